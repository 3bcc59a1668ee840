"""What a run shows: bars on a terminal, plain lines elsewhere, its log entries, and its summary."""

from __future__ import annotations

import importlib
import math
import operator
import sys
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, TextIO

from tqdm import tqdm

from hftrain.callbacks.base import Metrics, TrainerCallback
from hftrain.core.extras import is_available
from hftrain.core.state import TrainerControl, TrainerState

# Without a terminal: the shortest time between two lines, and the largest number of lines.
PLAIN_INTERVAL_S = 30.0
PLAIN_LINES = 10

Rows = dict[str, list[str]]

# Times and rates, named `<prefix>_runtime` etc., are shown last and by their units.
_UNITS = {
    "runtime": "s",
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "steps_per_second": "steps/s",
}


def number_text(value: float) -> str:
    """Return a number with about four digits.

    Example:
        >>> [number_text(each) for each in (0.03125, 12.34567, 1234.5, 4.98765e-05, 2e9, math.nan, 7)]
        ['0.0312', '12.35', '1234', '4.99e-05', '2.00e+09', 'nan', '7']
    """
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and not 1e-3 <= size < 1e7:
        return f"{value:.2e}"
    if 0.01 <= size < 1:
        return f"{value:.4f}"
    return f"{value:.0f}" if size >= 1000 else f"{value:#.4g}"


def seconds_text(seconds: float) -> str:
    """Return a time in readable units with about three digits.

    Example:
        >>> [seconds_text(each) for each in (2e-5, 0.0341, 12.345, 61, 98765)]
        ['20.0 us', '34.1 ms', '12.3 s', '1 min 1 s', '27 h 26 min']
    """
    if seconds >= 60:
        minutes, hours = int(seconds // 60), int(seconds // 3600)
        return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds % 60)} s"
    scale, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    value = seconds * scale
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:#.3g} {unit}"


def log_texts(logs: Mapping[str, Any], max_str_len: int = 100) -> list[str]:
    """Return the values of a log entry as texts, without its position in the run.

    Example:
        >>> log_texts({"eval_runtime": 1.5, "eval_samples_per_second": 20.0, "eval_loss": 0.25, "epoch": 1.0})
        ['eval_loss 0.2500', '1.50 s', '20.00 samples/s']
    """
    texts, measures = [], []
    for name, value in logs.items():
        ending = next((unit for unit in _UNITS if name.endswith(f"_{unit}")), None)
        is_number = isinstance(value, (int, float))
        text = number_text(value) if is_number else str(value)
        if isinstance(value, str) and len(value) > max_str_len:
            text = f"{value[:max_str_len]}... ({len(value)} characters)"
        # An evaluation's steps per second are batches, which follow from the samples.
        is_of_batches = ending == "steps_per_second" and not name.startswith("train_")
        if is_of_batches or name in ("epoch", "step", "total_flos"):
            continue
        if ending is not None and is_number:
            measures.append(seconds_text(value) if ending == "runtime" else f"{text} {_UNITS[ending]}")
        else:
            texts.append(f"{'lr' if name == 'learning_rate' else name} {text}")
    return texts + measures


def is_terminal(file: Any) -> bool:
    """Return whether an output is a terminal; it may have no method that tells."""
    return bool(getattr(file, "isatty", bool)())


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel; never imports IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def is_notebook_table(callback: Any) -> bool:
    """Return whether a callback is transformers' display for notebooks, which may not be imported."""
    return any(base.__module__ == "transformers.utils.notebook" for base in type(callback).__mro__)


class SummaryCallback(TrainerCallback):
    """Print a summary at the end of `train()`: steps, time, best metric, checkpoints, and what was unusual.

    Add it for the summary in a log file or pipe, with `disable_tqdm=True`, or in a notebook. A subclass may
    override `show_summary` to send the text elsewhere. Only process zero is called.

    Args:
        file: The output; standard output by default.
    """

    shows_summary = True

    def __init__(self, *, file: TextIO | None = None) -> None:
        self._file = file

    def show_summary(self, title: str, rows: Rows) -> None:
        """Show the summary of a run.

        Args:
            title: A line that says what the run did.
            rows: The cells of each row, by its label.
        """
        width = max(map(len, rows), default=0)
        lines = [f"  {label:<{width}}  {'  '.join(cells)}" for label, cells in rows.items()]
        print(title, *lines, sep="\n", file=self._file or sys.stdout, flush=True)


class ProgressCallback(TrainerCallback):
    """Show a bar of optimizer steps, a bar per evaluation or prediction, and the logs; on process zero only.

    The bar is tqdm's. Each log entry is a line above it. At the end of training a terminal gets a summary of the run;
    `SummaryCallback` prints it anywhere.

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
        self._loader: Any = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.training_bar = self._open("train", state.max_steps, initial=state.global_step, unit="step")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.training_bar.n)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Advance the bar of the evaluation or prediction; opens it at the first batch."""
        if not state.is_world_process_zero:
            return
        # A failed evaluation leaves its bar, which has another loader.
        if self.prediction_bar is None or self._loader is not eval_dataloader:
            self._close_prediction()
            # Only predictions pass their outputs.
            name = "predict" if "outputs" in kwargs else "evaluate"
            total = operator.length_hint(eval_dataloader) or None
            self.prediction_bar = self._open(name, total, unit="batch", leave=self.training_bar is None)
            self._loader = eval_dataloader
        self.prediction_bar.update()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_prediction()

    on_predict = on_evaluate

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Metrics = None, **kwargs: Any
    ) -> None:
        """Write a log entry above the bars, and its loss into the training bar."""
        file = self._file or sys.stdout
        # After an evaluation outside of training, its bar is enough for a terminal.
        if not logs or not state.is_world_process_zero or (self.training_bar is None and is_terminal(file)):
            return
        texts = log_texts(logs, self.max_str_len)
        if self.training_bar is not None:
            epoch = [f"epoch {logs['epoch']:.2f}"] if "epoch" in logs else []
            texts = [f"step {state.global_step}/{state.max_steps}", *epoch, *texts]
            for loss in (text for text in texts if text.startswith("loss ")):
                self.training_bar.set_postfix_str(loss, refresh=False)
        tqdm.write("  ".join(texts), file=file)
        file.flush()
        for bar in (self.training_bar, self.prediction_bar):
            if isinstance(bar, _PlainLines):
                bar.note_line()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.close_run()

    @property
    def shows_summary(self) -> bool:
        """Whether this callback prints a run's summary: only on a terminal."""
        return is_terminal(self._file or sys.stdout)

    def show_summary(self, title: str, rows: Rows) -> None:
        """Print a run's summary, see `SummaryCallback`."""
        SummaryCallback(file=self._file).show_summary(title, rows)

    def close_run(self) -> None:
        """Close the bars, also those of a run that failed."""
        self._close_prediction()
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _close_prediction(self) -> None:
        bar, self.prediction_bar, self._loader = self.prediction_bar, None, None
        if bar is not None:
            bar.close()

    def _open(self, name: str, total: int | None, *, initial: int = 0, unit: str, leave: bool = True) -> Any:
        file = self._file or sys.stderr
        options: dict[str, Any] = {"desc": name, "total": total, "initial": initial, "unit": unit}
        if not (is_terminal(file) or in_notebook()):
            return _PlainLines(file, **options)
        # Without tqdm's monitor thread, because loader workers may be forked.
        kind = type("Bar", (importlib.import_module("tqdm.auto").tqdm,), {"monitor_interval": 0})
        return kind(**options, file=file, leave=leave, dynamic_ncols=True, miniters=1)


class _PlainLines(tqdm):  # type: ignore[type-arg]
    """A bar that draws nothing: its count is printed as a line from time to time, and at the end."""

    monitor_interval = 0

    def __init__(self, output: TextIO, *, total: int | None, **options: Any) -> None:
        self._output = output
        nowhere: Any = SimpleNamespace(write=lambda text: None)
        miniters = -(-(total or 0) // PLAIN_LINES)
        super().__init__(total=total, **options, file=nowhere, ncols=0, miniters=miniters, mininterval=PLAIN_INTERVAL_S)

    def update(self, n: float | None = 1) -> bool | None:
        is_due = super().update(n)
        if is_due:
            print(self, file=self._output, flush=True)
        return is_due

    def note_line(self) -> None:
        """Take the count as printed, by a line of the log."""
        self.last_print_n, self.last_print_t = self.n, time.time()

    def close(self) -> None:
        if not self.disable and self.last_print_n != self.n:
            print(self, file=self._output, flush=True)
        super().close()


def display() -> Any:
    """Return the callback's class that shows bars, or in a notebook that of transformers, if it is installed."""
    if in_notebook() and is_available("transformers"):
        return importlib.import_module("transformers.utils.notebook").NotebookProgressCallback
    return ProgressCallback
