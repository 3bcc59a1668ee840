"""Progress of training and evaluation: bars on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import operator
import sys
import time
from typing import Any, TextIO

from tqdm import tqdm

from hftrain.callbacks.base import Metrics, TrainerCallback
from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState

PLAIN_LINES = 10
PLAIN_INTERVAL_S = 1.0


class ProgressCallback(TrainerCallback):
    """Show a bar of optimizer steps, a bar per evaluation or prediction, and the logs; on process zero only.

    If the output is not a terminal, it prints plain lines instead: at most one per tenth of the work and per second,
    and one at the end.

    Args:
        max_str_len: Longer texts in logs are cut on display.
        file: Where everything goes; by default the bars go to standard error and the logs to standard output.

    Units:
        max_str_len: characters.

    Source: the documented `ProgressCallback`.
    """

    def __init__(self, max_str_len: int = 100, *, file: TextIO | None = None) -> None:
        self.max_str_len = max_str_len
        self._file = file
        self._training: Meter | None = None
        self._prediction: Meter | None = None
        self._loader: Any = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the training bar at the step reached so far; closes what a failed run left open."""
        self._close_all()
        if state.is_world_process_zero:
            self._training = Meter("train", state.max_steps, initial=state.global_step, unit="step", file=self._file)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the training bar."""
        if self._training is not None:
            self._training.advance_to(state.global_step)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Move the evaluation's bar; opens it at the first batch."""
        if not state.is_world_process_zero:
            return
        # An evaluation that failed halfway leaves its bar behind: another loader, or one batch too many, gives it away.
        if self._prediction is None or self._prediction.is_full or self._loader is not eval_dataloader:
            self._close_prediction()
            total = operator.length_hint(eval_dataloader) or None
            leave = self._training is None
            self._prediction = Meter("inference", total, unit="batch", file=self._file, leave=leave)
            self._loader = eval_dataloader
        self._prediction.advance_to(self._prediction.n + 1)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the bar of the evaluation or prediction."""
        self._close_prediction()

    on_predict = on_evaluate

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Metrics = None, **kwargs: Any
    ) -> None:
        """Write a training run's log entry above the bars."""
        if self._training is not None and logs:
            shown = {name: shorten(value, self.max_str_len) for name, value in logs.items() if name != "total_flos"}
            file = self._file or sys.stdout
            tqdm.write(str(shown), file=file)
            file.flush()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the bars."""
        self._close_all()

    def _close_prediction(self) -> None:
        if self._prediction is not None:
            self._prediction.close()
            self._prediction = self._loader = None

    def _close_all(self) -> None:
        self._close_prediction()
        if self._training is not None:
            self._training.close()
            self._training = None


def shorten(value: Any, max_str_len: int) -> Any:
    """Round a float and cut a long text for display: four decimals, or four digits below 1.

    Example:
        >>> shorten(0.123456, 10), shorten(1234.56789, 10), shorten("a long story", 6)
        (0.1235, 1234.5679, 'a long... (12 characters)')
    """
    if isinstance(value, str) and len(value) > max_str_len:
        return f"{value[:max_str_len]}... ({len(value)} characters)"
    if isinstance(value, float):
        return float(f"{value:.4g}") if abs(value) < 1 else round(float(value), 4)
    return value


class Meter:
    """Count towards a total: a bar on a terminal, plain lines anywhere else.

    Args:
        total: Where the count ends; None if unknown.
        file: Where to show it; standard error by default.
    """

    def __init__(
        self,
        name: str,
        total: int | None,
        *,
        initial: int = 0,
        unit: str,
        file: TextIO | None = None,
        leave: bool = True,
    ) -> None:
        self.n = initial
        self._name, self._total, self._initial, self._unit = name, total, initial, unit
        self._file = file or sys.stderr
        self._bar: _Bar | None = None
        if getattr(self._file, "isatty", bool)():
            looks: dict[str, Any] = {"leave": leave, "dynamic_ncols": True, "miniters": 1}
            self._bar = _Bar(desc=name, total=total, initial=initial, unit=unit, file=self._file, **looks)
        self._stride = max(1, -(-total // PLAIN_LINES)) if total else sys.maxsize
        self._next_line = initial + self._stride
        self._printed: int | None = None
        self._started = self._last_line = time.monotonic()

    @property
    def is_full(self) -> bool:
        """Tell whether the total is reached."""
        return self._total is not None and self.n >= self._total

    def advance_to(self, n: int) -> None:
        """Show that `n` are done."""
        if self._bar is not None:
            self._bar.update(n - self.n)
        self.n = n
        if self._bar is None and n >= self._next_line:
            now = time.monotonic()
            if now - self._last_line >= PLAIN_INTERVAL_S:
                self._print(now)

    def close(self) -> None:
        """Show the final count and let go of the output."""
        if self._bar is not None:
            self._bar.close()
        elif self._printed != self.n:
            self._print(time.monotonic())

    def _print(self, now: float) -> None:
        self._last_line, self._printed, self._next_line = now, self.n, self.n + self._stride
        line = tqdm.format_meter(
            self.n, self._total or 0, now - self._started, 0, self._name, unit=self._unit, initial=self._initial
        )
        print(line, file=self._file, flush=True)


class _Bar(tqdm):  # type: ignore[type-arg]
    """A bar without tqdm's watchdog thread: `miniters=1` does its work, and loader processes may be forked."""

    monitor_interval = 0
