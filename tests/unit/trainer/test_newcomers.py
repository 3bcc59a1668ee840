"""What people who come from Lightning or from their own loop write first works, or the error says what to do."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, Task, make_arguments, make_rows, make_trainer
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from hftrain import (
    CheckpointError,
    ConfigError,
    StepOutput,
    TaskError,
    Trainer,
    TrainerCallback,
)


class Counting(TrainerCallback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1


def fit(task: Any, folder: Path, **parts: Any) -> Trainer:
    trainer = make_trainer(folder, task, max_steps=2, **parts)
    trainer.train()
    return trainer


def test_one_callback_needs_no_list(tmp_path: Path) -> None:
    callback = Counting()
    fit(Task(), tmp_path, callbacks=callback)
    assert callback.steps == 2


@pytest.mark.parametrize("several", [lambda loader: [loader, loader], lambda loader: {"a": loader, "b": loader}])
def test_several_loaders_in_place_of_one_are_refused(tmp_path: Path, several: Any) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return several(DataLoader(make_rows(), 4))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=r"of loaders: batches come from one loader"):
        Own(Task(), make_arguments(tmp_path, max_steps=1), train_dataset=make_rows()).train()


def test_metrics_in_module_containers_are_reported(tmp_path: Path) -> None:
    class Measured(Task):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a": MeanMetric(), "b": nn.ModuleList([MeanMetric()])})

        def evaluation_step(self, batch: Any) -> StepOutput:
            self.parts["a"].update(1.0)
            self.parts["b"][0].update(2.0)
            return self.training_step(batch)

    results = Trainer(Measured(), make_arguments(tmp_path), eval_dataset=make_rows(4)).evaluate()
    assert (results["eval_parts_a"], results["eval_parts_b_0"]) == (1.0, 2.0)


@pytest.mark.parametrize("place", ["list", "model"])
def test_metrics_that_nobody_reports_are_named(tmp_path: Path, place: str) -> None:
    class Measured(Task):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [MeanMetric()] if place == "list" else None
            if place == "model":
                self.model.score = MeanMetric()

        def evaluation_step(self, batch: Any) -> StepOutput:
            (self.hidden[0] if self.hidden else self.model.score).update(1.0)  # type: ignore[operator]
            return self.training_step(batch)

    name = r"hidden\[0\]" if place == "list" else r"model\.score"
    with pytest.warns(UserWarning, match=rf"The metrics {name} are updated but not reported"):
        Trainer(Measured(), make_arguments(tmp_path), eval_dataset=make_rows(4)).evaluate()


class Scored(Task):
    """Updates a metric in training, and reports it if it is told to."""

    def __init__(self, *, reports: bool, calls: bool = False) -> None:
        super().__init__()
        self.score, self.reports, self.calls = MeanMetric(), reports, calls

    def training_step(self, batch: Any) -> StepOutput:
        (self.score if self.calls else self.score.update)(1.0)
        return super().training_step(batch)

    def metrics(self, stage: str) -> Any:
        return {"score": self.score} if stage == "train" and self.reports else super().metrics(stage)


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("reports", [False, True])
def test_metric_that_is_updated_in_training_is_reported_or_named(tmp_path: Path, reports: bool, calls: bool) -> None:
    trainer = make_trainer(tmp_path, Scored(reports=reports, calls=calls), train_dataset=make_rows(8), max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    # Its user has the value of each batch, if the metric was called.
    named = [str(warning.message) for warning in caught if "metrics score are updated in training" in str(warning)]
    assert len(named) == (not reports and not calls)
    assert any(entry.get("score") == 1 for entry in trainer.state.log_history) is reports


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("found", [None, "4", [4]])
def test_count_that_is_no_number_is_refused(tmp_path: Path, found: Any, accumulation: int) -> None:
    class Counted(Task):
        def count_items(self, batch: Any) -> Any:
            return found

    arguments = make_arguments(tmp_path, max_steps=1, gradient_accumulation_steps=accumulation)
    trainers = [
        Trainer(Counted(), arguments, train_dataset=make_rows(8), eval_dataset=make_rows(4)),
        Trainer(Net(), arguments, train_dataset=make_rows(8), eval_dataset=make_rows(4), count_items=lambda _: found),
    ]
    for trainer in trainers:
        for run in (trainer.evaluate, trainer.train) if accumulation == 2 else (trainer.evaluate,):
            with pytest.raises(TaskError, match=r"Cannot weigh a batch by .*Return their number"):
                run()


def test_a_child_that_a_method_hides_is_refused(tmp_path: Path) -> None:
    class Named(Task):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = nn.ModuleDict()  # type: ignore[method-assign, assignment]

    with pytest.raises(TaskError, match=r"Cannot use Named.metrics.*another name"):
        Trainer(Named(), make_arguments(tmp_path))


def test_a_tasks_own_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Stateful(Task):
        def get_extra_state(self) -> Any:
            return {"hidden": None}

        def set_extra_state(self, state: Any) -> None:
            raise NotImplementedError

    callback = Counting()
    arguments = make_arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    with pytest.raises(CheckpointError, match=r"what Stateful holds next to its model: _extra_state .*buffers"):
        Trainer(Stateful(), arguments, train_dataset=make_rows(), callbacks=callback).train()
    assert callback.steps == 0
