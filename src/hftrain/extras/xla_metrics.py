"""XLA's metrics of compilations, transfers and waits."""

from __future__ import annotations

from typing import Any

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.optional import require
from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState


class XLAMetricsCallback(TrainerCallback):
    """Print XLA's own metrics after every epoch and evaluation, on the first process.

    Source: the documented `debug="tpu_metrics_debug"`.
    """

    def __init__(self) -> None:
        require("torch_xla", feature="debug='tpu_metrics_debug'", extra="xla")

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Print the metrics so far."""
        import torch_xla.debug.metrics

        if state.is_world_process_zero:
            print(torch_xla.debug.metrics.metrics_report(), flush=True)

    on_evaluate = on_epoch_end
