"""Print logs, for runs without a progress bar."""

from __future__ import annotations

from typing import Any

from hftrain.callbacks.base import Metrics, TrainerCallback
from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState


class PrinterCallback(TrainerCallback):
    """Print every log entry in full precision, on each machine's first process.

    Source: the documented `PrinterCallback`.
    """

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Metrics = None, **kwargs: Any
    ) -> None:
        """Print the entry, without the count of floating-point operations."""
        if state.is_local_process_zero and logs:
            print({name: value for name, value in logs.items() if name != "total_flos"}, flush=True)
