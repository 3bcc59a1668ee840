from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from hftrain.callbacks import CallbackHandler
from hftrain.core.errors import ConfigError
from hftrain.core.state import TrainerControl, TrainerState
from hftrain.extras.early_stopping import EarlyStoppingCallback


def make_args(**settings) -> SimpleNamespace:
    settings = {
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "eval_strategy": "steps",
        "load_best_model_at_end": True,
        **settings,
    }
    return SimpleNamespace(**settings)


def evaluations_until_stop(values, callback, *, key="eval_loss", state=None, **settings) -> int:
    """Play the Trainer's part: the best metric is updated after the event."""
    args, state = make_args(**settings), state or TrainerState()
    runner = CallbackHandler([callback], args=args, state=state, control=TrainerControl())
    runner.fire("on_train_begin")
    for count, value in enumerate(values, start=1):
        state.global_step += 1
        if runner.fire("on_evaluate", metrics={key: value, "eval_runtime": 1.0}).should_training_stop:
            return count
        best = state.best_metric
        if best is None or (value > best if args.greater_is_better else value < best):
            state.best_metric = value
    return 0


@pytest.mark.parametrize(
    ("values", "patience", "threshold", "stops_at"),
    [
        ([1.0, 0.9, 0.8], 1, 0.0, 0),
        ([1.0, 0.9, 0.95], 1, 0.0, 3),
        ([1.0, 1.0], 1, 0.0, 2),
        ([1.0, 1.1, 0.9, 1.0, 1.0, 1.0], 3, 0.0, 6),
        ([1.0, 1.1, 1.1, 0.9], 3, 0.0, 0),
        ([1.0, 0.95], 1, 0.1, 2),
        ([1.0, 0.8], 1, 0.1, 0),
        ([1.0, 0.8], 1, None, 0),
        ([float("nan"), 0.9], 1, 0.0, 1),
        ([float("nan"), 0.9, 0.8], 2, 0.0, 0),
        ([1.0, float("nan"), float("nan")], 2, 0.0, 3),
    ],
)
def test_patience_counts_evaluations_without_improvement(values, patience, threshold, stops_at) -> None:
    assert evaluations_until_stop(values, EarlyStoppingCallback(patience, threshold)) == stops_at


def test_greater_may_be_better() -> None:
    rising = {"metric_for_best_model": "eval_f1", "greater_is_better": True, "key": "eval_f1"}
    assert evaluations_until_stop([0.1, 0.2, 0.3], EarlyStoppingCallback(1), **rising) == 0
    assert evaluations_until_stop([0.3, 0.2, 0.1], EarlyStoppingCallback(2), **rising) == 3


def test_count_survives_a_resume_and_is_forgotten_by_a_new_run() -> None:
    callback = EarlyStoppingCallback(3)
    assert evaluations_until_stop([1.0, 1.1, 1.2], callback) == 0
    resumed = EarlyStoppingCallback.from_state(callback.state())
    assert evaluations_until_stop([1.3], resumed, state=TrainerState(global_step=3, best_metric=1.0)) == 1
    assert evaluations_until_stop([1.3, 1.4], callback) == 0
    assert callback.early_stopping_patience_counter == 1


@pytest.mark.parametrize(
    "settings", [{"metric_for_best_model": None}, {"eval_strategy": "no"}, {"greater_is_better": None}]
)
def test_train_begin_refuses_missing_settings(settings) -> None:
    with pytest.raises(ConfigError, match="Set metric_for_best_model, greater_is_better, and eval_strategy"):
        EarlyStoppingCallback().on_train_begin(make_args(**settings), TrainerState(), TrainerControl())


def test_evaluate_without_a_metric_to_follow_is_refused() -> None:
    args = make_args(metric_for_best_model=None)
    with pytest.raises(ConfigError, match="Set metric_for_best_model"):
        EarlyStoppingCallback().on_evaluate(args, TrainerState(), TrainerControl(), metrics={"eval_loss": 1.0})


@pytest.mark.parametrize("metrics", [{"eval_loss": 1.0, "eval_acc": 0.5, "eval_runtime": 2.0}, {"eval_acc": 0.5}])
def test_missing_metric_is_refused_with_the_available_names(metrics) -> None:
    args = make_args(metric_for_best_model="f1")
    with pytest.raises(ConfigError, match=r"gave no 'eval_f1'\. Choose one of: eval_acc"):
        EarlyStoppingCallback().on_evaluate(args, TrainerState(), TrainerControl(), metrics=metrics)


def test_evaluation_of_another_set_does_not_count() -> None:
    callback = EarlyStoppingCallback(1)
    args, state, control = make_args(metric_for_best_model="a_loss"), TrainerState(best_metric=1.0), TrainerControl()
    callback.on_evaluate(args, state, control, metrics={"eval_b_loss": 3.0, "eval_b_runtime": 1.0})
    assert not control.should_training_stop
    callback.on_evaluate(args, state, control, metrics={"eval_a_loss": 3.0, "eval_a_runtime": 1.0})
    assert control.should_training_stop


@pytest.mark.parametrize("limits", [{"early_stopping_patience": 0}, {"early_stopping_threshold": -0.1}])
def test_limits_below_their_range_are_refused(limits) -> None:
    with pytest.raises(ConfigError, match="patience of at least 1"):
        EarlyStoppingCallback(**limits)


def test_train_begin_mentions_that_the_last_model_stays(caplog) -> None:
    args = make_args(load_best_model_at_end=False)
    with caplog.at_level(logging.WARNING, logger="hftrain"):
        EarlyStoppingCallback().on_train_begin(args, TrainerState(), TrainerControl())
    assert "load_best_model_at_end" in caplog.text
