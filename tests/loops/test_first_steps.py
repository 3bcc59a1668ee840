"""Modules without gradients, which the first steps show."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, at, make_rows, train
from torch import nn

from hftrain import TaskModule, TrainerCallback


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Parts(TaskModule):
    """An encoder and a head; `encode` says how the encoder is called."""

    def __init__(self, encode: Any = None, **others: nn.Module) -> None:
        torch.manual_seed(0)
        super().__init__(nn.ModuleDict({"encoder": Encoder(), "head": nn.Linear(4, 3), **others}))
        self.encode = encode or (lambda model, x: model.encoder(x))
        self.num_calls = 0

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.num_calls += 1
        return nn.functional.cross_entropy(self.model.head(self.encode(self.model, batch["x"])), batch["labels"])


def without_gradients(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.encoder(x)  # type: ignore[no-any-return]


def fit(folder: Path, task: Any, *callbacks: Any, steps: int = 12, **options: Any) -> Any:
    return train(folder, task, *callbacks, max_steps=steps, train_dataset=make_rows(48), optim="sgd", **options)


@pytest.mark.parametrize("steps", [2, 12])
@pytest.mark.parametrize(
    ("encode", "reason"),
    [
        (without_gradients, r"runs under torch.no_grad\(\)"),
        (lambda model, x: model.encoder(x).detach(), "has detached outputs"),
    ],
)
def test_encoder_without_gradients_is_named(tmp_path: Path, encode: Any, reason: str, steps: int) -> None:
    with pytest.warns(UserWarning, match=rf"model.encoder got no gradient in the first {min(steps, 10)} .*{reason}"):
        trainer = fit(tmp_path, Parts(encode), steps=steps)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.task.modules())


def test_partly_frozen_encoder_under_no_grad_is_named(tmp_path: Path) -> None:
    task = Parts(without_gradients)
    task.model.encoder.layers[0].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"model.encoder got no gradient in the first 10 updates"):
        fit(tmp_path, task, gradient_accumulation_steps=2, eval_strategy="no")


class Average(TrainerCallback):
    """Move a teacher towards the encoder."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for theirs, ours in zip(model.teacher.parameters(), model.encoder.parameters(), strict=True):
                theirs.data.lerp_(ours, 0.1)


def teach(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = model.teacher(x)
    return model.encoder(x) + target  # type: ignore[no-any-return]


def test_programs_that_are_right_warn_of_nothing(tmp_path: Path) -> None:
    def every_third(model: Any, x: torch.Tensor) -> torch.Tensor:
        every_third.step += 1  # type: ignore[attr-defined]
        with torch.set_grad_enabled(every_third.step % 3 == 0):  # type: ignore[attr-defined]
            return model.encoder(x)  # type: ignore[no-any-return]

    def expert(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.encoder(x) if x[0, 0] < 9 else model.other(x)  # type: ignore[no-any-return]

    def pooled(model: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = model.encoder(x)
        model.pooler(hidden)
        return hidden  # type: ignore[no-any-return]

    every_third.step = 0  # type: ignore[attr-defined]
    frozen = Parts(without_gradients)
    frozen.model.encoder.requires_grad_(False)
    cases: list[tuple[Any, list[Any]]] = [
        (Parts(every_third), []),
        (Parts(expert, other=nn.Linear(4, 4)), []),
        (Parts(pooled, pooler=nn.Linear(4, 4)), []),
        (Parts(lambda model, x: pooled(model, x) + model.encoder(x).detach(), pooler=nn.Linear(4, 4)), []),
        (Parts(teach, teacher=Encoder()), [Average()]),
        (frozen, []),
        (Net(), []),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, (task, callbacks) in enumerate(cases):
            evaluated = {"eval_dataset": make_rows(4), "eval_strategy": "steps", "eval_steps": 3}
            fit(tmp_path / str(number), task, *callbacks, **(evaluated if isinstance(task, Net) else {}))


def test_hooks_that_user_code_adds_to_the_optimizer_do_not_disturb_the_checks(tmp_path: Path) -> None:
    steps = []
    hook = at(
        "on_train_begin",
        lambda args, state, control, optimizer, **kwargs: optimizer.register_step_post_hook(lambda *_: steps.append(1)),
    )
    fit(tmp_path, Net(), hook)
    assert len(steps) == 12
