"""Format log entries and summaries as readable text: aligned lines, folded at the width of a terminal."""

from __future__ import annotations

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

Rows = dict[str, list[str]]

_SHORT = {"learning_rate": "lr"}
# Times and rates, named `<prefix>_runtime` etc.: shown last, and left out on a narrow terminal.
_UNITS = {
    "runtime": "s",
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "steps_per_second": "steps/s",
}
_MIN_VALUE = 6
# Stands for the spaces in a cell while lines are folded.
_TIED = "\0"


def number_text(value: float) -> str:
    """Return a number with about four digits, so that most numbers of a column are equally wide.

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


def columns_of(file: Any) -> int | None:
    """Return how many columns a terminal has; None if a file is not a terminal."""
    if not getattr(file, "isatty", bool)():
        return None
    try:
        columns = os.get_terminal_size(file.fileno()).columns
    except (AttributeError, OSError, ValueError):
        columns = 0
    return columns or shutil.get_terminal_size().columns


class LogLines:
    """Format a run's log entries so that numbers of the same name are aligned.

    Args:
        max_str_len: Characters after which texts are cut.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self._max_str_len = max_str_len
        self._widths: dict[str, int] = {}

    def split(self, logs: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
        """Return the values of an entry as texts by display name, and its times and rates with units."""
        values: dict[str, str] = {}
        rates = []
        for name, value in logs.items():
            ending = next((each for each in _UNITS if name.endswith(f"_{each}")), None)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            text = number_text(value) if is_number else str(value)
            if len(text) > self._max_str_len and isinstance(value, str):
                text = f"{text[: self._max_str_len]}... ({len(text)} characters)"
            if ending == "steps_per_second" and not name.startswith("train_"):
                continue  # batches per second, which follow from the samples
            if ending is not None:
                rates.append(seconds_text(value) if ending == "runtime" and is_number else f"{text} {_UNITS[ending]}")
            elif name not in ("epoch", "step", "total_flos"):
                values[_SHORT.get(name, name)] = text
        return values, rates

    def format(
        self, logs: Mapping[str, Any], *, step: int, of: tuple[int, int], pace: str = "", width: int | None
    ) -> str:
        """Return an entry as a line, or as several lines that fit the width.

        Args:
            logs: A log entry.
            step: The optimizer step it belongs to.
            of: The number of steps and epochs of the whole run.
            pace: The time of a step, as text; added at the end.
            width: Columns of the terminal: longer lines are folded between values, and times and rates that do not
                fit are left out. None allows a line of any length.
        """
        values, rates = self.split(logs)
        max_steps, num_epochs = of
        head = [f"step {step:>{len(str(max_steps))}}/{max_steps}"]
        if "epoch" in logs:
            digits = len(str(num_epochs)) if num_epochs < 10_000 else 1  # sys.maxsize if unknown
            head.append(f"epoch {logs['epoch']:{digits + 3}.2f}")
        for name, text in values.items():
            self._widths[name] = max(self._widths.get(name, _MIN_VALUE), len(text))
        cells = [f"{name} {text:<{self._widths[name]}}" for name, text in values.items()]
        extras = rates + [pace] * bool(pace)
        if width is None:
            return "  ".join([*head, *cells, *extras]).rstrip()
        lines = fold([*head, *cells], width - 1)
        for extra in extras:
            if len(lines[-1]) + 2 + len(extra) < width:
                lines[-1] += f"  {extra}"
        return "\n".join(line.rstrip() for line in lines)


def fold(cells: Iterable[str], width: int, *, indent: int = 2) -> list[str]:
    """Join cells with two spaces into lines of at most `width` characters; only longer cells are broken.

    Args:
        indent: Spaces before each line but the first.

    Example:
        >>> fold(["step 1/9", "loss 0.5000", "an_accuracy 0.1"], 22)
        ['step 1/9  loss 0.5000', '  an_accuracy 0.1']
    """
    text = "  ".join(cell.replace(" ", _TIED) if len(cell) <= width - indent else cell for cell in cells)
    wrapped = textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)
    return [line.replace(_TIED, " ").rstrip() for line in wrapped]


def summary_text(title: str, rows: Rows, *, width: Any = None) -> str:
    """Return a summary as text.

    Args:
        width: Columns of the terminal; None does not fold lines.

    Example:
        >>> print(summary_text("Trained 9 steps", {"loss": ["0.5", "mean 0.7"], "evaluation": ["eval_loss 0.4"]}))
        Trained 9 steps
          loss        0.5  mean 0.7
          evaluation  eval_loss 0.4
    """
    indent = 4 + max(map(len, rows), default=0)
    lines = fold([title], width or sys.maxsize)
    for label, cells in rows.items():
        folded = fold(cells, max((width or sys.maxsize) - indent - 1, 20), indent=0)
        lines.append(f"{f'  {label}':<{indent}}" + f"\n{'':{indent}}".join(line.rstrip() for line in folded))
    return "\n".join(lines)
