"""The best evaluation so far, and the metric that decides it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import ConfigError, suggest
from hftrain.core.state import TrainerState
from hftrain.trainer.checks import best_metric_key


def note_best(args: TrainingArguments, state: TrainerState, metrics: Mapping[str, Any]) -> bool:
    """Remember the best evaluation so far in the state, and tell whether this is it."""
    if args.metric_for_best_model is None:
        return False
    value = read_metric(metrics, args.metric_for_best_model)
    best = state.best_metric
    # NaN is never better, and everything is better than NaN.
    is_better = best is None or best != best or (value > best if args.greater_is_better else value < best)
    is_better = is_better and value == value
    if is_better:
        state.best_metric, state.best_global_step = value, state.global_step
    return bool(is_better)


def is_left_out(metrics: Mapping[str, Any], wanted: str, *, has_all_sets: bool) -> bool:
    """Tell whether the evaluation set that decides has a cadence of its own, and had no part in an evaluation."""
    return not has_all_sets and best_metric_key(wanted) not in metrics


def read_metric(metrics: Mapping[str, Any], wanted: str) -> float:
    """Return the metric that picks the best model.

    Raises:
        ConfigError: The evaluation did not report it, or it is no number.
    """
    key = best_metric_key(wanted)
    if key not in metrics:
        raise ConfigError(
            f"metric_for_best_model={wanted!r} was asked for.",
            f"An evaluation reported no {key!r}.",
            f"Available: {', '.join(sorted(metrics))}. {suggest(key, metrics)}",
            metric_for_best_model=wanted,
        )
    try:
        return float(metrics[key])
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"metric_for_best_model={wanted!r} was asked for.",
            f"An evaluation reported {key!r} as a {type(metrics[key]).__name__}, which is not a single number.",
            "Let compute_metrics return a number under that name, or choose another metric.",
            **{key: metrics[key]},
        ) from error
