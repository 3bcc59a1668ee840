"""Progress of training, evaluation and prediction: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import operator
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
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


class MeterCallback(TrainerCallback):
    """Count the optimizer steps of a training, and the batches of an evaluation or prediction; on process zero only.

    Subclasses show the counts: they override `_open`.
    """

    _training: Meter | None = None
    _prediction: Meter | None = None
    _loader: Any = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start to count at the current step."""
        if state.is_world_process_zero:
            self._training = self._open("train", state.max_steps, initial=state.global_step, unit="step")

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
            # Only predictions pass their outputs.
            name = "predict" if "outputs" in kwargs else "evaluate"
            total = operator.length_hint(eval_dataloader) or None
            self._prediction = self._open(name, total, unit="batch", leave=self._training is None)
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

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the bars."""
        self.close_run()

    def _open(self, name: str, total: int | None, *, initial: int = 0, unit: str, leave: bool = True) -> Meter:
        raise NotImplementedError

    @property
    def _meters(self) -> list[Meter]:
        return [meter for meter in (self._training, self._prediction) if meter is not None]

    def _close_prediction(self) -> None:
        meter, self._prediction, self._loader = self._prediction, None, None
        if meter is not None:
            meter.close()

    def close_run(self) -> None:
        """Close the bars, also those of a run that failed."""
        self._close_prediction()
        if self._training is not None:
            self._training.close()
            self._training = None


class ProgressCallback(MeterCallback):
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
        self._lines = LogLines(max_str_len)
        self._logged: dict[str, str] = {}
        self._undo: Callable[[], object] = bool

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the training bar at the current step."""
        super().on_train_begin(args, state, control, **kwargs)
        if self._training is not None:
            self._lines, self._logged = LogLines(self.max_str_len), {}
            self._undo = clearing_before_messages(self._clear)

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
        for meter in self._meters:
            meter.note_line()

    @property
    def shows_summary(self) -> bool:
        """Whether this callback prints a run's summary: only on a terminal."""
        return columns_of(self._file or sys.stdout) is not None

    def show_summary(self, title: str, rows: Rows) -> None:
        """Print a run's summary, see `SummaryCallback`."""
        file = self._file or sys.stdout
        self._write(summary_text(title, rows, width=columns_of(file)), file)

    def _open(self, name: str, total: int | None, *, initial: int = 0, unit: str, leave: bool = True) -> Meter:
        file = self._file or sys.stderr
        draw = None if columns_of(file) is None else partial(_Bar, leave=leave)
        return Meter(name, total, initial=initial, unit=unit, file=file, draw=draw)

    def _write(self, text: str, file: TextIO) -> None:
        tqdm.write(text, file=file)
        file.flush()

    def _clear(self) -> None:
        for meter in self._meters:
            meter.clear()

    def close_run(self) -> None:
        """Close the bars, and write messages without them."""
        super().close_run()
        self._undo()
        self._undo = bool


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
    """Count towards a total: plain lines, or what `draw` shows.

    Args:
        total: The final count; None if unknown.
        unit: "step" or "batch"; counting of batches begins when the first one is done.
        file: The output.
        draw: (meter) -> a bar with methods `refresh`, `clear` and `close`; None prints lines.
        refresh_s: The shortest time between two refreshes of the bar.
    """

    def __init__(
        self,
        name: str,
        total: int | None,
        *,
        initial: int = 0,
        unit: str,
        file: TextIO,
        draw: Callable[[Meter], Any] | None = None,
        refresh_s: float | None = None,
    ) -> None:
        self.n = initial
        self.fields: list[str] = []
        self.file, self.total, self._name, self._unit = file, total, name, unit
        # The time of the start and of the last step, and the start of the window that measures the time of a step.
        self._started_s = self._step_s = self._window_s = time.monotonic()
        self._initial = self._first = initial + (unit == "batch")
        self._pace = ""
        self._stride = -(-total // PLAIN_LINES) if total else 0
        self._printed = initial - 1
        self._wait_s = PLAIN_INTERVAL_S if draw is None else REFRESH_S if refresh_s is None else refresh_s
        self._next_s = self._started_s + (self._wait_s if draw is None else 0)
        # Created last, because it is drawn immediately.
        self._bar = None if draw is None else draw(self)

    @property
    def is_full(self) -> bool:
        """Return whether the total is reached."""
        return self.total is not None and self.n >= self.total

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
        """Return the count, the times and as many of the logged values as fit.

        Args:
            width: The available characters; None leaves out the bar.
            is_ascii: Draw the bar with characters that every terminal has.
        """
        bar = "" if width is None else "{bar}  "
        shape = "{desc} {percentage:3.0f}%  " + bar + "{n_fmt}/{total_fmt}  [{elapsed}<{remaining}]"
        meter: Any = partial(
            tqdm.format_meter,
            *(self.n, self.total or 0, time.monotonic() - self._started_s),
            prefix=self._name,
            ascii=is_ascii,
            initial=min(self._initial, self.n),
            bar_format=shape if self.total else "{desc}  {n_fmt}  [{elapsed}]",
        )
        tail, room = "", sys.maxsize if width is None else width - len(meter())
        for part in (self._pace_text(), *self.fields):
            if part and len(tail) + 2 + len(part) <= room:
                tail += f"  {part}"
        return f"{meter(ncols=None if width is None else width - len(tail))}{tail}"


class _Bar(tqdm):  # type: ignore[type-arg]
    """A bar with the text of its meter, and without tqdm's monitor thread, because loader workers may be forked."""

    monitor_interval = 0

    def __init__(self, meter: Meter, *, leave: bool) -> None:
        self._meter = meter
        super().__init__(file=meter.file, leave=leave)

    def __str__(self) -> str:
        # Leave one column free, because some terminals begin a new line after the last one.
        return self._meter.text((columns_of(self._meter.file) or 80) - 1, is_ascii=self.ascii is True)


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
