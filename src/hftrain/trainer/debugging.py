"""Callbacks of the `debug` argument."""

from __future__ import annotations

from hftrain.arguments.enums import DebugOption
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks import TrainerCallback
from hftrain.callbacks.xla_metrics import XLAMetricsCallback
from hftrain.core.errors import ConfigError
from hftrain.strategies.base import Strategy


def debug_callbacks(args: TrainingArguments, strategy: Strategy) -> list[TrainerCallback]:
    """Return the callbacks that `debug` selects.

    Raises:
        MissingDependencyError: XLA's metrics are requested without torch_xla.
        ConfigError: They are requested in a run that does not use XLA.
    """
    if DebugOption.TPU_METRICS_DEBUG not in args.debug:
        return []
    callback = XLAMetricsCallback()
    if strategy.name != "xla":
        raise ConfigError(
            "Cannot use debug='tpu_metrics_debug'.",
            f"It prints XLA's metrics, and strategy {strategy.name!r} does not run on XLA.",
            "Use strategy='xla', or leave it out.",
            debug=[str(option) for option in args.debug],
        )
    return [callback]
