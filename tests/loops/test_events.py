"""The order of events is the one that `core/events.py` shows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows, train

from hftrain import Trainer, TrainerCallback, set_seed
from hftrain.core.events import EVENTS


class Diary(TrainerCallback):
    def __init__(self) -> None:
        self.entries: list[str] = []
        self.seen: dict[str, set[str]] = {}


def _writer(event: str) -> Any:
    def write(self: Diary, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.entries.append(event.removeprefix("on_"))
        self.seen.setdefault(event, set()).update(name for name, value in kwargs.items() if value is not None)

    return write


for _event in EVENTS:
    setattr(Diary, _event, _writer(_event))


def test_events_come_in_the_documented_order(tmp_path: Path) -> None:
    diary = Diary()
    trainer = train(
        tmp_path, Task(), train_dataset=make_rows(10), eval_dataset=make_rows(3), callbacks=[diary], num_train_epochs=1,
        gradient_accumulation_steps=2, eval_strategy="epoch", save_strategy="epoch", eval_on_start=True,
    )  # fmt: skip
    trainer.predict(make_rows(3))
    update = ["pre_optimizer_step", "optimizer_step", "step_end", "log"]
    assert diary.entries == [
        "init_end",
        "train_begin",
        *["prediction_step", "log", "evaluate"],
        "epoch_begin",
        *["step_begin", "substep_end", *update],
        *["step_begin", *update],
        "epoch_end",
        *["prediction_step", "log", "evaluate", "save"],
        "log",
        "train_end",
        *["prediction_step", "predict"],
    ]


class Asks(Diary):
    """Ask for a save when an epoch begins, and for everything after the second step."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.entries.append("step_end")
        if state.global_step == 2:
            control.should_log = control.should_evaluate = control.should_save = True


def test_requests_are_acted_on_in_one_order_after_a_step_and_are_void_before_it(tmp_path: Path) -> None:
    asks = Asks()
    train(
        tmp_path, train_dataset=make_rows(12), eval_dataset=make_rows(3), callbacks=[asks], num_train_epochs=1,
        logging_strategy="no", save_strategy="steps",
    )  # fmt: skip
    second = asks.entries.index("step_end", asks.entries.index("step_end") + 1)
    actions = ["step_end", "log", "prediction_step", "log", "evaluate", "save", "step_begin"]
    assert asks.entries[second : second + 7] == actions
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]


def test_a_run_never_ends_early_or_late(tmp_path: Path) -> None:
    for options, steps in (
        ({"num_train_epochs": 1.5}, 9), ({"max_steps": 7}, 7), ({"max_steps": 13}, 13),
        ({"num_train_epochs": 1, "gradient_accumulation_steps": 4}, 2),
    ):  # fmt: skip
        trainer = Trainer(Net(), make_arguments(tmp_path, **options), train_dataset=make_rows(22))
        assert trainer.train().global_step == trainer.state.max_steps == steps


def test_nan_is_counted_and_shown(tmp_path: Path) -> None:
    order = torch.randperm(12, generator=torch.Generator().manual_seed(42)).tolist()
    # In the last step's batch: NaN gradients spoil what follows.
    rows = make_rows(12)
    rows[order[-1]] = {**rows[order[-1]], "x": torch.full((4,), math.nan)}
    options = {"num_train_epochs": 1}
    set_seed(0)
    trainer = Trainer(Net(), make_arguments(tmp_path, logging_steps=3, **options), train_dataset=rows)
    with pytest.warns(UserWarning, match="nonfinite_losses"):
        output = trainer.train()
    (entry,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    set_seed(0)
    with pytest.warns(UserWarning, match="in every step since the last log"):
        clean = train(tmp_path, train_dataset=rows, **options)
    finite = [entry["loss"] for entry in clean.state.log_history if entry.get("loss", math.nan) == entry.get("loss")]
    assert len(finite) == 2
    assert entry["loss"] == output.training_loss == pytest.approx(sum(finite) / 2)
    assert entry["nonfinite_losses"] == output.metrics["nonfinite_losses"] == 1
    assert sum(math.isnan(entry["loss"]) for entry in clean.state.log_history if "loss" in entry) == 1

    unfiltered = make_arguments(tmp_path, logging_steps=3, logging_nan_inf_filter=False, **options)
    assert math.isnan(Trainer(Net(), unfiltered, train_dataset=rows).train().training_loss)


def test_plateau_lowers_the_rate_after_an_evaluation_that_did_not_improve_the_metric(tmp_path: Path) -> None:
    """The first three evaluations improve; the loss, which is not what is asked for, would say otherwise."""
    scores = iter([0.1, 0.2, 0.3, 0.3, 0.4, 0.4])
    trainer = train(
        tmp_path, train_dataset=make_rows(4), eval_dataset=make_rows(4),
        compute_metrics=lambda prediction: {"score": next(scores)}, num_train_epochs=6, eval_strategy="epoch",
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "mode": "max"}, learning_rate=0.5,
        metric_for_best_model="score",
    )  # fmt: skip
    # The update of an epoch comes before its evaluation.
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.05, 0.05])
    assert trainer.get_learning_rates() == pytest.approx([0.005, 0.005])
