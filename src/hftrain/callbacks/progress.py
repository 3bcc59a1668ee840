"""Progress of training, evaluation and prediction: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import operator
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from tqdm import tqdm

from hftrain.callbacks.base import Metrics, TrainerCallback
from hftrain.callbacks.lines import LogLines, columns_of
from hftrain.callbacks.meters import Meter, bar_of, meter_of
from hftrain.callbacks.summary import Rows, summary_text
from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState


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
    def training_bar(self) -> Any:
        """The training bar, None outside of a training; a subclass may set a tqdm bar, which is advanced and closed."""
        return bar_of(self._training)

    @training_bar.setter
    def training_bar(self, bar: Any) -> None:
        self._training = meter_of(bar)

    @property
    def prediction_bar(self) -> Any:
        """The bar of an evaluation or prediction, with the same rules."""
        return bar_of(self._prediction)

    @prediction_bar.setter
    def prediction_bar(self, bar: Any) -> None:
        self._prediction = meter_of(bar)

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
