"""What a run shows: bars on a terminal, plain lines elsewhere, its log entries, and its summary."""

from __future__ import annotations

import importlib
import logging
import operator
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

from hftrain.callbacks.base import Metrics, TrainerCallback
from hftrain.callbacks.lines import LogLines, Rows, columns_of, seconds_text, summary_text
from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState

# Without a terminal: the shortest time between two lines, and the largest number of lines.
PLAIN_INTERVAL_S = 30.0
PLAIN_LINES = 10
REFRESH_S = 0.1


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel; never imports IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def is_notebook_table(callback: Any) -> bool:
    """Return whether a callback is transformers' display for notebooks, which may not be imported."""
    return any(base.__module__ == "transformers.utils.notebook" for base in type(callback).__mro__)


class ProgressCallback(TrainerCallback):
    """Show a bar of optimizer steps, a bar per evaluation or prediction, and the logs; on process zero only.

    The bar is tqdm's. It shows the time of a step, without evaluations and saves, and as many of the last logged
    numbers as fit. Each log entry is a line above it; on a terminal it is folded between values to fit. At the end of
    training a terminal gets a summary of the run; `SummaryCallback` prints it anywhere.

    If the output is neither a terminal nor a notebook, there are no bars: each log entry is one line, also outside of
    training. If nothing was logged for half a minute, a line shows the progress, at most ten times.

    Args:
        max_str_len: Longer texts in logs are cut on display.
        file: The output; by default standard error for the bars, and standard output for the logs.

    Attributes:
        training_bar: The bar of the steps, None outside of a training; a subclass may set its own.
        prediction_bar: The bar of an evaluation or prediction, with the same rules.

    Units:
        max_str_len: characters.

    Source: the documented `ProgressCallback`.
    """

    training_bar: Any = None
    prediction_bar: Any = None

    def __init__(self, max_str_len: int = 100, *, file: TextIO | None = None) -> None:
        self.max_str_len = max_str_len
        self._file = file
        self._lines = LogLines(max_str_len)
        self._logged: dict[str, str] = {}
        self._pace = ""
        # The end of the last step, and where the measurement of a step's time begins.
        self._step_s = self._begin_s = 0.0
        self._begin_step = 0
        self._loader: Any = None
        self._undo: Callable[[], object] = bool

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the training bar at the current step."""
        if not state.is_world_process_zero:
            return
        self.training_bar = self._open("train", state.max_steps, initial=state.global_step, unit="step")
        self._lines, self._logged, self._pace = LogLines(self.max_str_len), {}, ""
        self._step_s = self._begin_s = time.monotonic()
        self._begin_step = state.global_step
        self._undo = clearing_before_messages(self._clear)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the training bar."""
        if self.training_bar is not None:
            self._step_s = time.monotonic()
            self.training_bar.update(state.global_step - self.training_bar.n)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Advance the bar of the evaluation or prediction; opens it at the first batch."""
        if not state.is_world_process_zero:
            return
        bar = self.prediction_bar
        # A failed evaluation leaves its bar: detect it by another loader, or a batch beyond the total.
        if bar is None or self._loader is not eval_dataloader or bar.n == bar.total:
            self._close_prediction()
            # Only predictions pass their outputs.
            name = "predict" if "outputs" in kwargs else "evaluate"
            total = operator.length_hint(eval_dataloader) or None
            self.prediction_bar = self._open(name, total, unit="batch", leave=self.training_bar is None)
            self._loader = eval_dataloader
        self.prediction_bar.update()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the bar of the evaluation or prediction, whose time is not that of a step."""
        self._close_prediction()
        self.on_save(args, state, control)

    on_predict = on_evaluate

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the time since the last step out of the time of a step."""
        now = time.monotonic()
        self._begin_s += now - self._step_s
        self._step_s = now

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Metrics = None, **kwargs: Any
    ) -> None:
        """Write a log entry above the bars and into the training bar; outside of training, only to a file or pipe."""
        file = self._file or sys.stdout
        if self.training_bar is None or not logs:
            if logs and state.is_world_process_zero and columns_of(file) is None:
                # On a terminal the bar of an evaluation is enough.
                values, rates = self._lines.split(logs)
                self._write("  ".join([*(f"{name} {text}" for name, text in values.items()), *rates]), file)
            return
        pace = self._read_pace(state.global_step) if "loss" in logs else ""
        self._logged.update(self._lines.split(logs)[0])
        shown = [f"{name} {self._logged[name]}" for name in sorted(self._logged, key=_rank)]
        self.training_bar.set_postfix_str(self._fitting([self._pace, *shown]), refresh=False)
        step, whole = state.global_step, (state.max_steps, state.num_train_epochs)
        self._write(self._lines.format(logs, step=step, of=whole, pace=pace, width=columns_of(file)), file)
        for bar in (self.training_bar, self.prediction_bar):
            if bar is not None:
                getattr(bar, "note_line", bar.refresh)()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the bars."""
        self.close_run()

    @property
    def shows_summary(self) -> bool:
        """Whether this callback prints a run's summary: only on a terminal."""
        return columns_of(self._file or sys.stdout) is not None

    def show_summary(self, title: str, rows: Rows) -> None:
        """Print a run's summary, see `SummaryCallback`."""
        file = self._file or sys.stdout
        self._write(summary_text(title, rows, width=columns_of(file)), file)

    def close_run(self) -> None:
        """Close the bars, also those of a run that failed, and write messages without them."""
        self._close_prediction()
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None
        self._undo()
        self._undo = bool

    def _open(self, name: str, total: int | None, *, initial: int = 0, unit: str, leave: bool = True) -> Any:
        file = self._file or sys.stderr
        has_bar = columns_of(file) is not None or in_notebook()
        shape = "{desc} {percentage:3.0f}%  " + ("{bar}  " if has_bar else "") + "{n_fmt}/{total_fmt}  "
        shape = shape + "[{elapsed}<{remaining}{postfix}]" if total else "{desc}  {n_fmt}  [{elapsed}]"
        options: dict[str, Any] = {"desc": name, "total": total, "initial": initial, "unit": unit, "file": file}
        options["bar_format"] = shape
        if not has_bar:
            return _PlainLines(**options, miniters=-(-(total or 0) // PLAIN_LINES), mininterval=PLAIN_INTERVAL_S)
        kind = importlib.import_module("tqdm.auto").tqdm if in_notebook() else _Bar
        return kind(**options, leave=leave, dynamic_ncols=True, miniters=1, mininterval=REFRESH_S)

    def _fitting(self, parts: list[str]) -> str:
        """Return as many texts as fit next to the counts of the training bar, so that a bar is left."""
        room, text = (columns_of(self.training_bar.fp) or sys.maxsize) - 50, ""
        for part in filter(None, parts):
            longer = f"{text}  {part}".strip()
            text = longer if len(longer) <= room else text
        return text

    def _read_pace(self, step: int) -> str:
        """Return the time of a step since the last call, as text, and start a new measurement."""
        self._step_s = time.monotonic()
        if step > self._begin_step:
            self._pace = f"{seconds_text((self._step_s - self._begin_s) / (step - self._begin_step))}/step"
        self._begin_s, self._begin_step = self._step_s, step
        return self._pace

    def _close_prediction(self) -> None:
        bar, self.prediction_bar, self._loader = self.prediction_bar, None, None
        if bar is not None:
            bar.close()

    def _write(self, text: str, file: TextIO) -> None:
        tqdm.write(text, file=file)
        file.flush()

    def _clear(self) -> None:
        for bar in (self.training_bar, self.prediction_bar):
            if bar is not None and columns_of(bar.fp) is not None:
                bar.clear()


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


class _Bar(tqdm):  # type: ignore[type-arg]
    """A bar without tqdm's monitor thread, because loader workers may be forked."""

    monitor_interval = 0


class _PlainLines(_Bar):
    """A count that is printed as a line from time to time, and at the end."""

    def __init__(self, **options: Any) -> None:
        self._reported = options["initial"] - 1
        super().__init__(**options)

    @staticmethod
    def status_printer(file: Any) -> Any:
        """Return None: there is no bar to draw, and nothing to erase."""

    def update(self, n: float | None = 1) -> bool | None:
        """Count, and print a line if one is due."""
        is_due = super().update(n)
        if is_due:
            self._print()
        return is_due

    def refresh(self, nolock: bool = False, lock_args: Any = None) -> None:
        """Do nothing: there is no bar to draw again."""

    def clear(self, nolock: bool = False) -> None:
        """Do nothing: there is no bar to erase."""

    def note_line(self) -> None:
        """Take the count as reported, by a line of the log."""
        self._reported = self.last_print_n = self.n
        self.last_print_t = time.time()

    def close(self) -> None:
        """Print the final count, unless the last line has reported it."""
        if not self.disable and self._reported != self.n:
            self._print()
        super().close()

    def _print(self) -> None:
        self._reported = self.n
        print(self, file=self.fp, flush=True)


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


class SummaryCallback(TrainerCallback):
    """Print a summary at the end of `train()`: steps, time, metrics, checkpoints, and what was unusual.

    Add it for the summary in a log file or pipe, with `disable_tqdm=True`, or in a notebook. A subclass may
    override `show_summary` to send the text elsewhere. Only process zero is called.

    Args:
        file: The output; standard output by default.
    """

    def __init__(self, *, file: TextIO | None = None) -> None:
        self._file = file

    def show_summary(self, title: str, rows: Rows) -> None:
        """Show the summary of a run.

        Args:
            title: A line that says what the run did.
            rows: The cells of each row, by its label.
        """
        file = self._file or sys.stdout
        print(summary_text(title, rows, width=columns_of(file)), file=file, flush=True)
