"""The best evaluation so far, and the metric that ranks evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from hftrain.arguments.training import TrainingArguments
from hftrain.checkpoint.manifest import checkpoint_name
from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.state import TrainerState
from hftrain.optim.schedules import follows_metric
from hftrain.rules.evaluation import best_metric_key


class _Evaluation(NamedTuple):
    step: int
    metric: float


class BestMetric:
    """Store the best evaluation so far in the state (mutated), and the metrics of checkpoints for the manifest.

    Args:
        keep_best: How many of the best checkpoints the run keeps, see `SavePolicy`.
    """

    def __init__(self, args: TrainingArguments, state: TrainerState, *, keep_best: int | None) -> None:
        self._args, self._state, self._keep_best = args, state, keep_best
        self._last_evaluation = _Evaluation(0, math.nan)
        # The step of the last checkpoint, and its path.
        self._last_checkpoint: tuple[int, str] | None = None
        # The best checkpoints by name: their own manifests may have been written before the evaluation.
        self._metrics_by_name: dict[str, float] = {}

    def note(self, metrics: Mapping[str, Any], *, has_all_sets: bool) -> bool:
        """Store the metric of this step's evaluation, and tell whether it is the best one so far."""
        args, state, metric_name = self._args, self._state, self._args.metric_for_best_model
        if not metric_name or not state.global_step or is_left_out(metrics, metric_name, has_all_sets=has_all_sets):
            return False
        value, best = read_metric(metrics, metric_name), state.best_metric
        self._last_evaluation = _Evaluation(state.global_step, value)
        if best is None or math.isnan(best):
            is_better = not math.isnan(value)
        else:  # NaN compares as not better
            is_better = value > best if args.greater_is_better else value < best
        if is_better:
            state.best_metric, state.best_global_step = value, state.global_step
        self.link()
        return is_better

    def note_saved(self, step: int, path: str) -> None:
        """Store that a step has a checkpoint, whether or not its evaluation is done."""
        self._last_checkpoint = step, path
        self.link()

    def link(self) -> None:
        """Connect the last checkpoint with the evaluation of its step, whichever of them came first."""
        if self._last_checkpoint is None:
            return
        step, path = self._last_checkpoint
        if self._state.best_global_step == step:
            self._state.best_model_checkpoint = path
        if self._last_evaluation.step == step and math.isfinite(self._last_evaluation.metric):
            candidates = {**self._metrics_by_name, checkpoint_name(step): self._last_evaluation.metric}.items()
            best_first = sorted(candidates, key=itemgetter(1), reverse=bool(self._args.greater_is_better))
            self._metrics_by_name = dict(best_first[: self._keep_best or 0])

    def state_dict(self) -> dict[str, Any]:
        """Return the metric for the manifest of this step's checkpoint (None for NaN, or if it was not evaluated)."""
        last = self._last_evaluation
        is_known = last.step == self._state.global_step and math.isfinite(last.metric)
        return {"metric": last.metric if is_known else None, "earlier_metrics": self._metrics_by_name}

    def load_state_dict(self, facts: Mapping[str, Any]) -> None:
        """Restore the metrics of the checkpoints before this one."""
        self._metrics_by_name = dict(facts.get("earlier_metrics", {}))


# Endings of the names of values that describe the evaluation itself, such as its speed.
_NOT_METRICS = ("epoch", "_runtime", "_per_second", "_preparation_time")


def follow_metric(
    schedule: Any, args: TrainingArguments, state: TrainerState, metrics: Mapping[str, Any], *, has_all_sets: bool
) -> None:
    """Step a schedule that depends on evaluations; do nothing for others."""
    metric_name = args.metric_for_best_model or "loss"
    is_reported = not is_left_out(metrics, metric_name, has_all_sets=has_all_sets)
    if follows_metric(schedule) and state.global_step > 0 and is_reported:
        schedule.step(read_metric(metrics, metric_name))


def is_left_out(metrics: Mapping[str, Any], metric_name: str, *, has_all_sets: bool) -> bool:
    """Tell whether the evaluation set of the wanted metric has its own interval, and was not evaluated now."""
    return not has_all_sets and best_metric_key(metric_name) not in metrics


def read_metric(metrics: Mapping[str, Any], metric_name: str) -> float:
    """Return the metric that selects the best model.

    Raises:
        ConfigError: The evaluation did not report it, or it is not a number.
    """
    key = best_metric_key(metric_name)
    if not isinstance(metrics, Mapping):
        raise TaskError(
            f"Cannot read metric_for_best_model={metric_name!r}:",
            f"evaluate() returned a {type(metrics).__name__}, not a dict.",
            "Let the override of evaluate end with return metrics.",
        )
    if key not in metrics:
        reported = sorted(name for name in metrics if not name.endswith(_NOT_METRICS))
        raise ConfigError(
            f"Cannot use metric_for_best_model={metric_name!r}.",
            f"The evaluation did not report {key!r}.",
            f"Available: {', '.join(reported)}."
            if reported
            else "It reported no metric: its batches have no labels, and the model returned no loss without them. Name "
            "the labels' column in label_names, let the model return a loss, or pass compute_metrics.",
        )
    try:
        return float(metrics[key])
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Cannot use metric_for_best_model={metric_name!r}.",
            f"An evaluation reported {key!r} as a {type(metrics[key]).__name__}, which is not a single number.",
            "Let compute_metrics return a number under that name, or choose another metric.",
            **{key: metrics[key]},
        ) from error
