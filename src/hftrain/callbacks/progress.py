"""Progress of training, evaluation and prediction: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import operator
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

from hftrain.callbacks.base import Metrics, TrainerCallback
from hftrain.callbacks.lines import LogLines, columns_of, seconds_text
from hftrain.callbacks.summary import Rows, summary_text
from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState

REFRESH_S = 0.1
# Without a terminal: the shortest time between two lines, and the largest number of lines.
PLAIN_INTERVAL_S = 30.0
PLAIN_LINES = 10
MIN_BAR, MAX_BAR = 8, 30


class ProgressCallback(TrainerCallback):
    """Show a bar of optimizer steps, a bar per evaluation or prediction, and the logs; on process zero only.

    The bar shows the time of a step, without evaluations and saves, and as many of the last logged numbers as fit. Each
    log entry is a line above it; on a terminal it is folded between values to fit. At the end of training a terminal
    gets a summary of the run; `SummaryCallback` prints it anywhere.

    If the output is not a terminal, there are no bars: each log entry is one line, also outside of training. If
    nothing was logged for half a minute, a line shows the progress, at most ten times.

    Args:
        max_str_len: Longer texts in logs are cut on display.
        file: The output; by default standard error for the bars, and standard output for the logs.

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
        self._lines = LogLines(max_str_len)
        self._logged: dict[str, str] = {}
        self._undo: Callable[[], object] = bool

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the training bar at the current step; closes the bars of a failed run."""
        self._close_all()
        if state.is_world_process_zero:
            self._lines, self._logged = LogLines(self.max_str_len), {}
            self._training = self._open("train", state.max_steps, initial=state.global_step, unit="step")
            self._undo = clearing_before_messages(self._clear)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the training bar."""
        if self._training is not None:
            self._training.advance_to(state.global_step)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Advance the bar of the evaluation or prediction; opens it at the first batch."""
        if not state.is_world_process_zero:
            return
        # A failed evaluation leaves its bar: detect it by another loader, or a batch beyond the total.
        if self._prediction is None or self._prediction.is_full or self._loader is not eval_dataloader:
            self._close_prediction()
            total = operator.length_hint(eval_dataloader) or None
            name, leave = stage_of(kwargs), self._training is None
            self._prediction = self._open(name, total, initial=0, unit="batch", leave=leave)
            self._loader = eval_dataloader
        self._prediction.advance_to(self._prediction.n + 1)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the bar of the evaluation or prediction, whose time is not that of a step."""
        self._close_prediction()
        self._skip_time(args, state, control)

    on_predict = on_evaluate

    def _skip_time(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.skip_time()

    on_save = _skip_time

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Metrics = None, **kwargs: Any
    ) -> None:
        """Write a log entry above the bars and into the training bar; outside of training, only to a file or pipe."""
        file = self._file or sys.stdout
        if self._training is None or not logs:
            if logs and state.is_world_process_zero and columns_of(file) is None:
                # On a terminal the bar of an evaluation is enough.
                values, rates = self._lines.split(logs)
                self._write("  ".join([*(f"{name} {text}" for name, text in values.items()), *rates]), file)
            return
        pace = self._training.read_pace() if "loss" in logs else ""
        self._logged.update(self._lines.split(logs)[0])
        self._training.fields = [f"{name} {self._logged[name]}" for name in sorted(self._logged, key=_rank)]
        step, whole = state.global_step, (state.max_steps, state.num_train_epochs)
        self._write(self._lines.format(logs, step=step, of=whole, pace=pace, width=columns_of(file)), file)
        for meter in (self._training, self._prediction):
            if meter is not None:
                meter.note_line()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the bars."""
        self._close_all()

    @property
    def shows_summary(self) -> bool:
        """Whether this callback prints a run's summary: only on a terminal."""
        return columns_of(self._file or sys.stdout) is not None

    def show_summary(self, title: str, rows: Rows) -> None:
        """Print a run's summary, see `SummaryCallback`."""
        file = self._file or sys.stdout
        self._write(summary_text(title, rows, width=columns_of(file)), file)

    def _open(self, name: str, total: int | None, *, initial: int, unit: str, leave: bool = True) -> Meter:
        return Meter(name, total, initial=initial, unit=unit, file=self._file, leave=leave)

    def _write(self, text: str, file: TextIO) -> None:
        tqdm.write(text, file=file)
        file.flush()

    def _clear(self) -> None:
        for meter in (self._training, self._prediction):
            if meter is not None:
                meter.clear()

    def _close_prediction(self) -> None:
        if self._prediction is not None:
            self._prediction.close()
            self._prediction = self._loader = None

    def _close_all(self) -> None:
        self._close_prediction()
        if self._training is not None:
            self._training.close()
            self._training = None
        self._undo()
        self._undo = bool


def stage_of(extra: dict[str, Any]) -> str:
    """Return the stage of an `on_prediction_step` event: only predictions pass their outputs."""
    return "predict" if "outputs" in extra else "evaluate"


def _rank(name: str) -> int:
    """Return a sort key for the values of a bar: the loss, evaluation metrics, others."""
    return 0 if name == "loss" else 1 if name.startswith("eval_") else 2


def clearing_before_messages(clear: Callable[[], None]) -> Callable[[], None]:
    """Call `clear` before `logging` or `warnings` write to the console; return a function that ends this."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    found = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    handlers = [each for each in (*found, logging.lastResort) if isinstance(each, logging.StreamHandler)]
    show = warnings.showwarning

    def before_record(record: logging.LogRecord) -> bool:
        clear()
        return True

    def before_warning(*args: Any, **kwargs: Any) -> None:
        clear()
        show(*args, **kwargs)

    def end() -> None:
        for handler in handlers:
            handler.removeFilter(before_record)
        if warnings.showwarning is before_warning:
            warnings.showwarning = show

    for handler in handlers:
        handler.addFilter(before_record)
    warnings.showwarning = before_warning
    return end


class Meter:
    """Count towards a total: a bar on a terminal, plain lines anywhere else.

    Args:
        total: The final count; None if unknown.
        unit: "step" or "batch"; counting of batches begins when the first one is done.
        file: The output; standard error by default.
        leave: Keep the full bar on the screen.
        draw: (meter, leave) -> a bar for a terminal, with methods `refresh`, `clear` and `close`.
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
        draw: Callable[[Meter, bool], Any] | None = None,
    ) -> None:
        self.n = initial
        self.fields: list[str] = []
        self._name, self._total, self._unit = name, total, unit
        self.file = file or sys.stderr
        # The time of the start and of the last step, and the start of the window that measures the time of a step.
        self._started_s = self._step_s = self._window_s = time.monotonic()
        self._initial = self._first = initial + (unit == "batch")
        self._pace = ""
        is_terminal = columns_of(self.file) is not None
        self._stride = -(-total // PLAIN_LINES) if total else 0
        self._printed = initial - 1
        self._wait_s = REFRESH_S if is_terminal else PLAIN_INTERVAL_S
        self._next_s = self._started_s + self._wait_s
        # Created last, because it is drawn immediately.
        self._bar: Any = (draw or _Bar)(self, leave) if is_terminal else None

    @property
    def is_full(self) -> bool:
        """Return whether the total is reached."""
        return self._total is not None and self.n >= self._total

    def advance_to(self, n: int) -> None:
        """Set the count to `n`, and show it if enough time has passed."""
        now = time.monotonic()
        self.n, self._step_s = n, now
        if now >= self._next_s:
            self._next_s = now + self._wait_s
            if self._bar is not None:
                self._bar.refresh()
            elif n >= self._printed + self._stride:
                self._print()

    def skip_time(self) -> None:
        """Exclude the time since the last step from the time of a step."""
        now = time.monotonic()
        self._window_s += now - self._step_s
        self._step_s = now

    def read_pace(self) -> str:
        """Return the time of a step since the last call, as text, and start a new measurement."""
        self._step_s = time.monotonic()
        self._pace = self._pace_text()
        self._window_s, self._first = self._step_s, self.n
        return self._pace

    def _pace_text(self) -> str:
        count = self.n - self._first
        if count <= 0:
            return self._pace
        return f"{seconds_text((self._step_s - self._window_s) / count)}/{self._unit}"

    def note_line(self) -> None:
        """Called after a line has reported the count."""
        self._printed = self.n
        self._next_s = time.monotonic() + self._wait_s
        if self._bar is not None:
            self._bar.refresh()

    def clear(self) -> None:
        """Hide the bar until it is shown again."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        """Show the final count and release the output."""
        if self._bar is not None:
            self._bar.close()
        elif self._printed != self.n:
            self._print()

    def _print(self) -> None:
        self._printed = self.n
        print(self.text(None), file=self.file, flush=True)

    def text(self, width: int | None, *, is_ascii: bool = False) -> str:
        """Return the count, the times and the logged values, as many as fit, in order of importance.

        Args:
            width: The available characters; None leaves out the bar.
            is_ascii: Draw the bar with characters that every terminal has.
        """
        done_s, total = time.monotonic() - self._started_s, self._total
        elapsed, left = tqdm.format_interval(done_s), "?"
        if total and self.n > self._initial:
            left = tqdm.format_interval(max(total - self.n, 0) * done_s / (self.n - self._initial))
        share = min(self.n / total, 1.0) if total else 0.0
        head = f"{self._name} {share:4.0%}" if total else self._name
        count, clock = (f"{self.n}/{total}", f"[{elapsed}<{left}]") if total else (str(self.n), f"[{elapsed}]")
        pace = self._pace_text()
        if width is None:
            return "  ".join(filter(None, (head, count, clock, pace)))
        # Add the parts that fit, in this order, each after two spaces.
        room, fitting = width - len(head), set()
        for part in (count, *self.fields[:1], clock, pace, " " * MIN_BAR, *self.fields[1:]):
            if part and len(part) + 2 <= room:
                room -= len(part) + 2
                fitting.add(part)
        bar = " " * MIN_BAR
        if total and bar in fitting:
            length = min(MIN_BAR + room, MAX_BAR)
            bar = f"{('#' if is_ascii else '█') * round(share * length):<{length}}"
            fitting.add(bar)
        shown = [head, *(part for part in (bar, count, clock, pace, *self.fields) if part in fitting)]
        return "  ".join(part for part in shown if part.strip() or total)[:width]


class _Bar(tqdm):  # type: ignore[type-arg]
    """A bar with the text of its meter, and without tqdm's monitor thread, because loader workers may be forked."""

    monitor_interval = 0

    def __init__(self, meter: Meter, leave: bool) -> None:
        self._meter = meter
        super().__init__(file=meter.file, leave=leave)

    def __str__(self) -> str:
        # Leave one column free, because some terminals begin a new line after the last one.
        return self._meter.text((columns_of(self._meter.file) or 80) - 1, is_ascii=self.ascii is True)
