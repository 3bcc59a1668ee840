"""What `debug=` asks for: nothing of it exists in a run that does not ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hftrain.arguments.enums import DebugOption
from hftrain.callbacks import TrainerCallback
from hftrain.callbacks.xla_metrics import XLAMetricsCallback
from hftrain.core.errors import ConfigError, explain
from hftrain.task.overflow import DebugUnderflowOverflow

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer


def debug_callbacks(trainer: Trainer) -> list[TrainerCallback]:
    """Return the callbacks that `debug` asks for.

    Raises:
        MissingDependencyError: XLA's metrics are asked for without torch_xla.
        ConfigError: They are asked for in a run that does not use XLA.
    """
    if DebugOption.TPU_METRICS_DEBUG not in trainer.args.debug:
        return []
    callback = XLAMetricsCallback()
    if trainer.strategy.name != "xla":
        raise ConfigError(
            explain(
                "debug='tpu_metrics_debug' was asked for.",
                f"It prints XLA's metrics, and strategy {trainer.strategy.name!r} does not run on XLA.",
                "Use strategy='xla', or leave it out.",
                debug=[str(option) for option in trainer.args.debug],
            )
        )
    return [callback]


def watch_overflow(trainer: Trainer) -> DebugUnderflowOverflow | None:
    """Hook the model of a run if `debug` asks for it; whoever calls it removes the hooks."""
    if DebugOption.UNDERFLOW_OVERFLOW not in trainer.args.debug:
        return None
    return DebugUnderflowOverflow(trainer.model)
