"""State that a callback or a task keeps to itself is named at the first save, because a resume would lose it."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_rows, make_trainer, train
from torchmetrics import MeanMetric

from hftrain import TrainerCallback


class Average(TrainerCallback):
    """Average the weights through `.data`, as many do."""

    def __init__(self) -> None:
        self.shadow = Net()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for mine, theirs in zip(self.shadow.parameters(), model.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.5)


class Sum(TrainerCallback):
    def __init__(self, helper: Any = None) -> None:
        self.total, self.helper = torch.zeros(()), helper or TrainerCallback()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.total = self.total + 1
        self.helper.on_step_end(args, state, control)


class Draw(TrainerCallback):
    def __init__(self) -> None:
        self.parts = deque([torch.Generator()])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.rand(2, generator=self.parts[0])


class Bank(Task):
    """A task with a memory that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = {"keys": torch.zeros(4)}

    def training_step(self, batch: Any) -> Any:
        self.memory["keys"][0] += 1
        return super().training_step(batch)


SAVES = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
CASES = {
    "module": (None, Average, r"Average.shadow \(Net\)"),
    "tensor": (None, Sum, r"Sum.total \(Tensor\)"),
    "helper": (None, lambda: Sum(Sum()), r"Sum.total \(Tensor\), Sum.helper.total \(Tensor\)"),
    "generator": (None, Draw, r"Draw.parts\[0\] \(Generator\)"),
    "task": (Bank, TrainerCallback, r"task.memory\['keys'\] \(Tensor\)"),
}


@pytest.mark.parametrize("name", CASES)
def test_state_that_changes_and_is_not_saved_is_named(tmp_path: Path, name: str) -> None:
    model, callback, wanted = CASES[name]
    with pytest.warns(UserWarning, match=rf"Checkpoints do not hold {wanted}, which changes in training"):
        train(tmp_path, model and model(), callback(), **SAVES)


def test_state_of_a_trainer_that_changes_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, None, callback := Average(), **SAVES)
    trainer.teacher = callback.shadow
    with pytest.warns(UserWarning, match=r"do not hold trainer.teacher \(Net\)"):
        trainer.train()


class Declared(Average):
    def checkpoint_objects(self) -> dict[str, Any]:
        return {"shadow": self.shadow}


class Exported(Sum):
    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"number": self.total.item()}}

    @classmethod
    def from_state(cls, state: Any) -> Any:
        return cls()


class Teacher(TrainerCallback):
    """Holds what does not change, and what the run saves anyway."""

    def __init__(self) -> None:
        self.teacher, self.weights = Net(), torch.ones(3)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.model, self.optimizer, self.schedule = (kwargs[name] for name in ("model", "optimizer", "lr_scheduler"))
        self.last = self.model.layers[4]
        self.view = self.last.weight.detach()


@pytest.mark.parametrize("callback", [Declared, Exported, Teacher])
def test_state_that_is_saved_or_does_not_change_is_not_named(tmp_path: Path, callback: Any) -> None:
    train(tmp_path, None, callback(), **SAVES)


@pytest.mark.parametrize("options", [{"save_strategy": "no"}, {"save_only_model": True}], ids=str)
def test_runs_that_cannot_be_resumed_name_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    train(tmp_path, None, Average(), **{**SAVES, **options})


def test_tensors_that_are_declared_resume_to_the_last_bit(tmp_path: Path) -> None:
    class Keeps(Sum):
        def checkpoint_objects(self) -> dict[str, Any]:
            return {"total": self.total}

    for callback, resume in ((Keeps(), None), (Keeps(), str(tmp_path / "checkpoint-2"))):
        train(tmp_path, None, callback, resume=resume, **{**SAVES, "max_steps": 4})
        assert callback.total == 4


def test_metrics_of_a_task_are_not_named(tmp_path: Path) -> None:
    class Counts(Task):
        def __init__(self) -> None:
            super().__init__()
            self.counts = [MeanMetric()]

        def metrics(self, stage: str) -> dict[str, Any]:
            return {"count": self.counts[0]} if stage == "eval" else {}

        def evaluation_step(self, batch: Any) -> Any:
            self.counts[0].update(1.0)
            return super().evaluation_step(batch)

    train(tmp_path, Counts(), **SAVES, eval_strategy="steps", eval_steps=1, eval_dataset=make_rows(4))
