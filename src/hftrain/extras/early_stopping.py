"""Stop a run whose metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hftrain.callbacks.base import CallbackResult, ExportableState, Metrics, TrainerCallback
from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.core.state import TrainerControl, TrainerState


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stop training when `metric_for_best_model` has not improved for a number of evaluations.

    Requires `metric_for_best_model` and an evaluation strategy. The count is saved in checkpoints; a run that starts at
    step 0 resets it. NaN never counts as an improvement.

    Args:
        early_stopping_patience: Consecutive evaluations without an improvement before training stops.
        early_stopping_threshold: Minimum difference to the best value that counts as an improvement.

    Raises:
        ConfigError: The patience is below 1 or the threshold negative.

    Source: the documented `EarlyStoppingCallback`.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold or 0.0
        self.early_stopping_patience_counter = 0
        if early_stopping_patience < 1 or self.early_stopping_threshold < 0:
            raise ConfigError(
                "Cannot use these limits of EarlyStoppingCallback.",
                "The patience counts evaluations and the threshold measures an improvement.",
                "Use a patience of at least 1 and a threshold of at least 0.",
                early_stopping_patience=early_stopping_patience,
                early_stopping_threshold=early_stopping_threshold,
            )

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the settings and reset the count.

        Raises:
            ConfigError: The metric, its direction or the evaluation strategy is not set.
        """
        self.check_settings(args)
        if not args.load_best_model_at_end:
            get_logger().warning("Early stopping without load_best_model_at_end=True ends with the last model.")
        if state.global_step == 0:
            self.early_stopping_patience_counter = 0

    def check_settings(self, args: Any) -> None:
        """Raise `ConfigError` unless a metric, a direction and an evaluation strategy are set."""
        if args.metric_for_best_model is None or args.greater_is_better is None or args.eval_strategy == "no":
            raise ConfigError(
                "Cannot use EarlyStoppingCallback:",
                "it needs a metric, its direction, and evaluations during training.",
                "Set metric_for_best_model, greater_is_better, and eval_strategy to 'epoch' or 'steps'.",
                metric_for_best_model=args.metric_for_best_model,
                greater_is_better=args.greater_is_better,
                eval_strategy=args.eval_strategy,
            )

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Metrics = None, **kwargs: Any
    ) -> CallbackResult:
        """Compare with the best metric so far, and stop when patience runs out.

        Raises:
            ConfigError: The evaluation did not return the metric.
        """
        value = self._read_metric(args, metrics or {})
        if value is None:
            return None
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True
        return control

    def check_metric_value(self, args: Any, state: TrainerState, control: TrainerControl, metric_value: float) -> None:
        """Compare a value with the best one so far and update the count; override to define an improvement."""
        is_better = _is_better(metric_value, state.best_metric, self.early_stopping_threshold, args.greater_is_better)
        self.early_stopping_patience_counter = 0 if is_better else self.early_stopping_patience_counter + 1

    def state(self) -> dict[str, Any]:
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }

    def _read_metric(self, args: Any, metrics: Mapping[str, Any]) -> float | None:
        """Return the metric, or None if this was an evaluation of another set (``eval_<set>_...``)."""
        if args.metric_for_best_model is None:
            self.check_settings(args)
        name = str(args.metric_for_best_model)
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name in metrics:
            return float(metrics[name])
        prefixes = {key.removesuffix("_runtime") for key in metrics if key.endswith("_runtime")}
        if prefixes and "eval" not in prefixes:
            return None
        raise ConfigError(
            "EarlyStoppingCallback looked for metric_for_best_model.",
            f"The evaluation gave no {name!r}.",
            f"Choose one of: {', '.join(sorted(metrics)) or '(no metrics at all)'}.",
            metric_for_best_model=args.metric_for_best_model,
        )


def _is_better(value: float, best: float | None, threshold: float, greater_is_better: bool) -> bool:
    if math.isnan(value):
        return False
    if best is None or math.isnan(best):
        return True
    return (value - best if greater_is_better else best - value) > threshold
