"""Each training step finds the model in training mode, whatever user code did to it before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, at, make_arguments, make_rows, make_trainer
from torch import nn

from hftrain import Trainer, TrainerCallback

EVENTS = ("on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_step_end", "on_log", "on_evaluate")


def quieting(event: str) -> type[TrainerCallback]:
    """Return a callback that puts the model into evaluation mode, as for a sample of text."""

    def quiet(self: Any, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        model.eval()

    return type("Quiet", (TrainerCallback,), {event: quiet})


def train(folder: Path, model: Any = None, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    """Train 4 updates of 2 micro-batches with much dropout, and evaluate once in between."""
    callbacks = options.pop("callbacks", None)
    torch.manual_seed(3)
    arguments = make_arguments(folder, max_steps=4, gradient_accumulation_steps=2, **options)
    trainer = kind(
        model or Net(dropout=0.5), arguments, train_dataset=make_rows(), eval_dataset=make_rows(5), callbacks=callbacks
    )
    trainer.train()
    return trainer


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("make", [Net, Task])
def test_eval_called_in_a_callback_ends_with_the_next_step(tmp_path: Path, event: str, make: Any) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2}
    torch.manual_seed(3)
    expected = train(tmp_path, make(dropout=0.5), **options)
    torch.manual_seed(3)
    found = train(tmp_path, make(dropout=0.5), callbacks=[quieting(event)], **options)
    assert torch.equal(weights(found), weights(expected))


class QuietLoss(Trainer):
    """A hook that samples from the model leaves a part of it in evaluation mode."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, return_outputs, **kwargs)
        self.model.layers[3].eval()
        return found


def test_eval_of_a_part_in_an_overridden_hook_ends_with_the_next_micro_step(tmp_path: Path) -> None:
    assert torch.equal(weights(train(tmp_path, kind=QuietLoss)), weights(train(tmp_path)))


class Frozen(Net):
    """Keeps its normalization in evaluation mode, until told otherwise."""

    is_frozen = True

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.seen: list[tuple[bool, bool]] = []
        self.num_calls = 0

    def train(self, mode: bool = True) -> Frozen:
        self.num_calls += 1
        super().train(mode)
        if self.is_frozen:
            self.layers[1].eval()
        return self

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        self.seen.append((self.layers[1].training, self.layers[3].training))
        return super().forward(x, labels)


def test_overridden_train_is_called_at_every_micro_step_as_documented(tmp_path: Path) -> None:
    class Thaw(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            model.is_frozen = state.global_step < 2

    model = Frozen()
    before = model.num_calls
    trainer = train(tmp_path, model, callbacks=[Thaw, quieting("on_step_end")])
    assert trainer.model.seen == [(False, True)] * 4 + [(True, True)] * 4
    assert model.num_calls - before >= 8


def test_task_that_overrides_train_keeps_its_say(tmp_path: Path) -> None:
    class WithTeacher(Task):
        def __init__(self) -> None:
            super().__init__(dropout=0.5)
            self.teacher = nn.Dropout()
            self.seen: list[tuple[bool, bool]] = []

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.teacher.eval()
            return self

        def training_step(self, batch: Any) -> Any:
            self.seen.append((self.model.training, self.teacher.training))
            return super().training_step(batch)

    task = WithTeacher()
    train(tmp_path, task, callbacks=[quieting("on_step_begin")])
    assert task.seen == [(True, False)] * 8


class Pretrained(nn.Sequential):
    """A model that is returned in evaluation mode."""

    @classmethod
    def from_pretrained(cls) -> Pretrained:
        return cls(nn.Linear(4, 3), nn.Dropout()).eval()


class WithTeacher(Task):
    """Has a teacher, and a model with a pretrained part, a frozen one and a normalization of fixed statistics."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.teacher = Pretrained.from_pretrained().requires_grad_(False)
        self.model.student = Pretrained.from_pretrained()
        self.model.other = Pretrained.from_pretrained().requires_grad_(False)
        self.model.layers[1].eval()
        self.seen: list[tuple[list[bool], list[bool]]] = []

    def training_step(self, batch: Any) -> Any:
        on = [self.model, self.model.layers[3], self.model.student[1]]
        off = [self.teacher[1], self.model.layers[1], self.model.other[1]]
        if torch.is_grad_enabled():
            self.seen.append(([part.training for part in on], [part.training for part in off]))
        return super().training_step(batch)


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end"])
def test_task_keeps_modules_in_evaluation_mode_that_its_user_put_there(tmp_path: Path, event: str) -> None:
    task, put = WithTeacher(), at(event, lambda *args, model, **kwargs: model.eval())
    train(tmp_path, task, callbacks=[put], eval_strategy="steps", eval_steps=2)
    assert task.seen == [([True] * 3, [False] * 3)] * 8


def test_frozen_part_of_a_plain_model_that_leaves_evaluation_mode_is_named(tmp_path: Path) -> None:
    model = Net(dropout=0.5)
    model.layers[3].eval()
    model.layers[0].requires_grad_(False).eval()  # its mode changes nothing
    with pytest.warns(UserWarning, match=r"^layers\.3 of Net: frozen"):
        train(tmp_path, model)
    assert model.layers[3].training


def test_module_added_in_evaluation_mode_is_trained_in_training_mode(tmp_path: Path) -> None:
    class Grow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                model.layers[3] = nn.Dropout().eval()
            seen.append(model.layers[3].training)

    seen: list[bool] = []
    train(tmp_path, callbacks=[Grow])
    assert seen == [False, True, True, True]


def test_another_model_given_to_training_step_is_put_into_training_mode(tmp_path: Path) -> None:
    class Two(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            other.eval()
            super().training_step(other, dict(inputs), num_items_in_batch)
            seen.append(other.training)
            return super().training_step(model, inputs, num_items_in_batch)

    seen: list[bool] = []
    other = Net(dropout=0.5)
    train(tmp_path, kind=Two)
    assert seen == [True] * 8


def test_optimizer_with_two_kinds_of_weights_trains_its_own_again(tmp_path: Path) -> None:
    class TwoKinds(torch.optim.SGD):
        is_training = False

        def train(self) -> None:
            self.is_training = True

        def eval(self) -> None:
            self.is_training = False

        def step(self, closure: Any = None) -> Any:
            seen.append(self.is_training)
            return super().step(closure)

    sample = at("on_step_begin", lambda args, state, control, optimizer, **kwargs: optimizer.eval())
    seen: list[bool] = []
    model = Net()
    trainer = make_trainer(
        tmp_path, model, optimizers=(TwoKinds(model.parameters(), lr=0.1), None), callbacks=[sample], max_steps=3
    )
    trainer.train()
    assert seen == [True] * 3


def test_modes_are_read_without_a_walk_over_the_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    walk = nn.Module.train

    def train_once(self: nn.Module, mode: bool = True) -> Any:
        if isinstance(self, Net):
            walks.append(mode)
        return walk(self, mode)

    monkeypatch.setattr(nn.Module, "train", train_once)
    train(tmp_path)
    assert len(walks) <= 2
