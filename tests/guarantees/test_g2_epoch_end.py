"""G2 where a checkpoint was taken at a step that ends a pass, before what comes at the end of the pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import assert_same, comparable, outcome
from support.tiny import Net, make_arguments, make_rows

from hftrain import SavePolicy, Trainer, TrainerCallback, set_seed


def make(
    folder: Path,
    *callbacks: TrainerCallback,
    kind: type[Trainer] = Trainer,
    save_policy: SavePolicy | None = None,
    **options: Any,
) -> Trainer:
    set_seed(1)
    defaults: dict[str, Any] = {
        "num_train_epochs": 3,
        "save_strategy": "steps",
        "save_steps": 7,
        "eval_strategy": "epoch",
    }
    arguments = make_arguments(folder, **{**defaults, **options})
    return kind(
        Net(dropout=0.2),
        arguments,
        train_dataset=make_rows(26),
        eval_dataset=make_rows(8),
        callbacks=list(callbacks),
        save_policy=save_policy,
    )


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_log_that_is_due_at_the_end_of_a_pass_is_that_of_its_last_step(tmp_path: Path, max_grad_norm: float) -> None:
    options: dict[str, Any] = {"logging_strategy": "epoch", "max_grad_norm": max_grad_norm}
    whole, resumed = make(tmp_path, **options), make(tmp_path, **options)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert_same(outcome(resumed), outcome(whole))


class Events(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("epoch_begin", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("step_end", state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("epoch_end", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("save", state.global_step))


class Draws(TrainerCallback):
    """Change the weights by random numbers at an epoch's end: what an evaluation sees hangs on the generators."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            model.layers[0].bias += torch.randn(8)


ENDS: dict[str, dict[str, Any]] = {
    "the last pass is whole": {},
    "the steps end within a pass": {"max_steps": 17},
    "one that is accumulated": {"gradient_accumulation_steps": 3},
    "a log is due too": {"logging_strategy": "epoch"},
    "a log window is open": {"logging_steps": 4},
}


@pytest.mark.parametrize("name", ENDS)
def test_a_run_that_died_before_its_last_evaluation_makes_it(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"metric_for_best_model": "loss", **ENDS[name]}
    whole, events = make(tmp_path, Draws(), **options), Events()
    whole.train()
    last = whole.state.global_step
    # What was saved last is all that a run killed in that evaluation leaves.
    resumed = make(tmp_path, Draws(), events, **options)
    resumed.train(resume_from_checkpoint=True)
    assert_same(outcome(resumed), outcome(whole))
    assert [line["step"] for line in resumed.state.log_history if "eval_loss" in line][-1] == last
    assert resumed.state.best_metric == whole.state.best_metric
    assert resumed.state.epoch == whole.state.epoch
    assert events.seen == [("epoch_begin", last), ("epoch_end", last), ("evaluate", last)]


@pytest.mark.parametrize("options", [{}, {"max_steps": 17}, {"logging_strategy": "epoch"}], ids=str)
def test_a_run_saved_after_its_last_evaluation_has_nothing_left(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {"save_strategy": "epoch", "load_best_model_at_end": True, **options}
    whole, events = make(tmp_path, **options), Events()
    whole.train()
    resumed = make(tmp_path, events, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{whole.state.global_step}"))
    assert events.seen == []
    assert_same(outcome(resumed), outcome(whole))


def test_more_passes_evaluate_once_where_the_run_had_ended(tmp_path: Path) -> None:
    make(tmp_path, num_train_epochs=2).train()
    events = Events()
    longer = make(tmp_path, events)
    longer.train(resume_from_checkpoint=True)
    evaluated = [step for name, step in events.seen if name == "evaluate"]
    assert (evaluated, longer.state.global_step) == ([14, 21], 21)


class Fails(Trainer):
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self.state.global_step == self.state.max_steps:
            raise RuntimeError("no data")
        return super().evaluate(*args, **kwargs)


def test_an_error_in_the_last_evaluation_leaves_it_and_its_save_to_the_resumed_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "epoch", "max_steps": 17}
    whole = make(tmp_path / "whole", **options)
    whole.train()
    failing = make(tmp_path, kind=Fails, save_policy=SavePolicy(on_exception=True), **options)
    with pytest.raises(RuntimeError, match="no data"):
        failing.train()
    events = Events()
    resumed = make(tmp_path, events, **options)
    resumed.train(resume_from_checkpoint=True)
    assert events.seen == [("evaluate", 17), ("save", 17)]
    assert_same(outcome(resumed), outcome(whole))
    again = make(tmp_path, Events(), **options)
    again.train(resume_from_checkpoint=True)
    assert again.callback_handler.callbacks[-2].seen == []


class Hooked(Trainer):
    num_seen = 0

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.num_seen += 1
        super()._maybe_log_save_evaluate(*args, **kwargs)


def test_a_subclass_sees_the_end_that_is_made_up_for(tmp_path: Path) -> None:
    options: dict[str, Any] = {"logging_strategy": "epoch", "kind": Hooked, "save_policy": SavePolicy(save_async=True)}
    whole, resumed = make(tmp_path, **options), make(tmp_path, **options)
    whole.train()
    resumed.train(resume_from_checkpoint=True)
    assert_same(outcome(resumed), outcome(whole))
    assert isinstance(whole, Hooked)
    assert isinstance(resumed, Hooked)
    assert (whole.num_seen, resumed.num_seen) == (21 + 3, 1)


def resume_from_the_last_step(folder: str) -> tuple[Any, Any, list[tuple[str, int]]]:
    """Train, and resume from the last step; answer with both histories, and the resumed run's events."""
    whole, events = make(Path(folder), num_train_epochs=2), Events()
    whole.train()
    resumed = make(Path(folder), events, num_train_epochs=2)
    resumed.train(resume_from_checkpoint=True)
    return comparable(whole.state.log_history), comparable(resumed.state.log_history), events.seen


@pytest.mark.distributed
def test_two_ranks_make_the_last_evaluation(run_distributed: Any, tmp_path: Path) -> None:
    for whole, resumed, seen in run_distributed(resume_from_the_last_step, folder=str(tmp_path)):
        assert resumed == whole
        assert [event for event, _ in seen] == ["epoch_begin", "epoch_end", "evaluate"]
