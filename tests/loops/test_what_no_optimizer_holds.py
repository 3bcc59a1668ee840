"""Weights that a run would leave as they are, and rates that it would not change: said once."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Task, train
from torch import nn

from hftrain import StepOutput, TaskModule, Trainer, TrainerCallback


class TwoParts(TaskModule):
    def __init__(self) -> None:
        super().__init__(nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 3)}))
        self.model.body.requires_grad_(False)
        self.seen: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen.append(batch)
        return nn.functional.cross_entropy(self.model.head(self.model.body(batch["x"])), batch["labels"])


class Thaw(TrainerCallback):
    def __init__(self, adds: bool) -> None:
        self.adds = adds

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            model.body.requires_grad_(True)
            if self.adds:
                optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.05})


def fit(task: TaskModule, folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    settings = {"max_steps": 5, "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, **settings}
    return train(folder, task, callbacks=list(callbacks), **settings)


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_an_added_group_decays_as_the_arguments_say(tmp_path: Path, decay: float) -> None:
    task = TwoParts()
    model = copy.deepcopy(task.model)
    fit(task, tmp_path, Thaw(adds=True), weight_decay=decay)
    optimizer = torch.optim.AdamW(
        [{"params": [model.head.weight]}, {"params": [model.head.bias], "weight_decay": 0.0}],
        lr=0.1,
        weight_decay=decay,
    )
    for number, batch in enumerate(task.seen, start=1):
        nn.functional.cross_entropy(model.head(model.body(batch["x"])), batch["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            model.body.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.05})
    for name, value in model.state_dict().items():
        torch.testing.assert_close(task.model.state_dict()[name], value, rtol=0, atol=1e-6)


def test_weights_that_are_unfrozen_and_in_no_optimizer_are_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="add_param_group"):
        fit(TwoParts(), tmp_path, Thaw(adds=False))


@pytest.mark.parametrize(
    "keep",
    [
        lambda head: [head],
        lambda head: {"head": head},
        lambda head: (head.weight,),
        lambda head: [head.weight.detach().requires_grad_()],
    ],
)
def test_weights_in_a_plain_container_are_named(tmp_path: Path, keep: Any) -> None:
    class Hidden(Task):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3, bias=False)
            kept = keep(self.head)
            del self.head
            self.kept = kept

        def training_step(self, batch: Any) -> StepOutput:
            kept = next(iter(self.kept.values() if isinstance(self.kept, dict) else self.kept))
            logits = self.model(batch["x"])[0] @ getattr(kept, "weight", kept)
            return StepOutput(loss=nn.functional.cross_entropy(logits, batch["labels"]))

    with pytest.warns(UserWarning, match=r"or are no nn.Parameter \(kept\["):
        fit(Hidden(), tmp_path)


def test_a_step_that_leaves_the_model_in_evaluation_mode_is_named(tmp_path: Path) -> None:
    class Quiet(TwoParts):
        def training_step(self, batch: Any) -> torch.Tensor:
            self.model.eval()
            return super().training_step(batch)

    with pytest.warns(UserWarning, match="left the model in evaluation mode"):
        fit(Quiet(), tmp_path)


def test_weights_of_an_optimizer_that_the_task_keeps_are_not_named(tmp_path: Path) -> None:
    class TwoOptimizers(TwoParts):
        def __init__(self) -> None:
            super().__init__()
            self.model.body.requires_grad_(True)
            self.own = torch.optim.SGD(self.model.body.parameters(), lr=0.1)

        def training_step(self, batch: Any) -> torch.Tensor:
            self.own.zero_grad()
            self.model.body(batch["x"]).pow(2).mean().backward()
            self.own.step()
            return super().training_step(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.head.parameters(), lr=0.1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(TwoOptimizers(), tmp_path)


def test_a_schedule_that_waits_for_evaluations_which_never_come_is_named(tmp_path: Path) -> None:
    class Plateau(Task):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    with pytest.warns(UserWarning, match="Set eval_strategy"):
        fit(Plateau(), tmp_path)
