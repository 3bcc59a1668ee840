"""Gradients of parameters that are unfrozen before an optimizer takes them: each update uses its own step's alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt
from support.tiny import make_rows, train
from torch import nn

from hftrain import TaskModule, TrainerCallback

STEPS, THAWED, HELD = 7, 2, 4


class TwoParts(TaskModule):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 3)}))
        self.model.body.requires_grad_(False)
        self.seen: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen.append(batch)
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.head.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model.head(model.body(batch["x"])), batch["labels"])


def change(model: Any, optimizer: Any, event: str, step: int, held_in: str) -> None:
    """Unfreeze the body after one step, and give it to the optimizer in a later one."""
    if event == "on_step_end" and step == THAWED:
        model.body.requires_grad_(True)
    if event == held_in and step == HELD:
        optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.05})


def changing(event: str) -> Any:
    def call(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        change(kwargs["model"], kwargs["optimizer"], event, state.global_step, self.held_in)

    return call


class Change(TrainerCallback):
    def __init__(self, held_in: str) -> None:
        self.held_in = held_in

    on_substep_end, on_pre_optimizer_step = changing("on_substep_end"), changing("on_pre_optimizer_step")
    on_step_end = changing("on_step_end")


def plain_loop(batches: list[Any], held_in: str, max_norm: float) -> tuple[nn.Module, list[float]]:
    model: Any = TwoParts().model
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for step in range(STEPS):
        for number, batch in enumerate(batches[2 * step : 2 * step + 2]):
            (loss_of(model, batch) / 2).backward()
            if not number:
                change(model, optimizer, "on_substep_end", step, held_in)
        if max_norm:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        change(model, optimizer, "on_pre_optimizer_step", step, held_in)
        optimizer.step()
        model.zero_grad()
        change(model, optimizer, "on_step_end", step + 1, held_in)
    return model, norms


def fit(folder: Path, *callbacks: TrainerCallback, max_norm: float = 0.5, **options: Any) -> Any:
    return train(
        folder, TwoParts(), *callbacks, train_dataset=make_rows(8 * STEPS), max_steps=STEPS, max_grad_norm=max_norm,
        gradient_accumulation_steps=2, lr_scheduler_type="constant", **options,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:body.weight, body.bias are no longer frozen")
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("held_in", ["on_step_end", "on_substep_end", "on_pre_optimizer_step"])
def test_late_unfrozen_parameters_train_as_in_a_plain_loop(tmp_path: Path, held_in: str, max_norm: float) -> None:
    trainer = fit(tmp_path, Change(held_in), max_norm=max_norm)
    model, norms = plain_loop(trainer.task.seen, held_in, max_norm)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value, rtol=1e-6, atol=1e-7, msg=name)
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert logged == pytest.approx(norms, rel=1e-5)


@pytest.mark.filterwarnings("ignore:body.weight, body.bias are no longer frozen")
@pytest.mark.filterwarnings("ignore:The loss depends on 2 parameters that no optimizer holds")
@pytest.mark.parametrize("stop", [2, 3, 4])
def test_resume_after_unfreezing_updates_as_the_whole_run(tmp_path: Path, stop: int) -> None:
    options = {"save_strategy": "steps", "save_steps": 100}
    whole = fit(tmp_path / "whole", Change("on_step_end"), **options)
    fit(tmp_path / "cut", Change("on_step_end"), StopAt(stop), **options)
    resumed = fit(tmp_path / "cut", Change("on_step_end"), resume=True, **options)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    norms = [[entry.get("grad_norm") for entry in each.state.log_history] for each in (whole, resumed)]
    assert norms[0] == norms[1]


@pytest.mark.parametrize("is_inside", [True, False])
def test_parameters_made_during_a_run_do_not_keep_gradients_of_earlier_steps(tmp_path: Path, is_inside: bool) -> None:
    made = nn.Linear(4, 4)
    with torch.no_grad():
        made.weight.copy_(torch.eye(4))
    expected = copy.deepcopy(made)

    class Grows(TwoParts):
        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            self.seen.append(batch)
            x = made(batch["x"]) if is_inside is False or "made" in self.model else batch["x"]
            return loss_of(self.model, {**batch, "x": x})

    class Grow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and is_inside:
                kwargs["model"]["made"] = made
            if state.global_step == 4:
                kwargs["optimizer"].add_param_group({"params": list(made.parameters())})

    task = Grows()
    head = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(head.head.parameters(), lr=0.1, momentum=0.9)
    train(
        tmp_path, task, Grow(), max_steps=STEPS, max_grad_norm=0.0, lr_scheduler_type="constant",
        train_dataset=make_rows(4 * STEPS),
    )  # fmt: skip
    for step, batch in enumerate(task.seen, start=1):
        x = batch["x"] if is_inside and step <= 2 else expected(batch["x"])
        loss_of(head, {**batch, "x": x}).backward()
        optimizer.step()
        head.zero_grad()
        expected.zero_grad()
        if step == 4:
            optimizer.add_param_group({"params": list(expected.parameters())})
    torch.testing.assert_close(made.state_dict(), expected.state_dict())


def test_gradients_of_an_interrupted_step_are_dropped_by_the_next_run(tmp_path: Path) -> None:
    outside = nn.Parameter(torch.ones(3))

    class Scaled(TwoParts):
        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            logits = self.model.head(self.model.body(batch["x"])) * outside
            return nn.functional.cross_entropy(logits, batch["labels"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.model.head.parameters(), outside], lr=0.0)

    class Fail(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("as asked")

    class See(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
            gradients.append([p.grad.clone() for p in optimizer.param_groups[0]["params"]])

    gradients: list[list[torch.Tensor]] = []
    task, options = Scaled(), {"max_steps": 1, "train_dataset": make_rows(4)}
    train(tmp_path, task, See(), **options)
    with pytest.raises(RuntimeError, match="as asked"):
        train(tmp_path, task, Fail(), **options)
    train(tmp_path, task, See(), **options)
    torch.testing.assert_close(*gradients)
