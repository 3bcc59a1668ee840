"""The log of a run by column: a dict for each of its entries would take twenty times the memory."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Point = tuple[float, float]
# Only in the last entry of a training, its summary.
_TOTAL = "train_runtime"
_LARGEST = 1 << 62


def is_number(value: Any) -> bool:
    """Tell whether a logged value is a number; bools, and integers that no float holds, are not."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, float) or (is_whole and -_LARGEST <= value <= _LARGEST)


class LogColumns:
    """Numbers of log entries.

    Attributes:
        names: The names of everything that was logged, those of the summary too.
        steps: The step of each entry, -1 if it has none.
        total_s: The duration in the last summary of a training.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.steps, self._epochs, self._times = array("q"), array("d"), array("d")
        # Name -> numbers of entries, and the values.
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self.total_s: float | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def add(self, entry: Mapping[str, Any], at_s: float = math.nan) -> None:
        """Append an entry, of which only the numbers are kept; `at_s` is its time, in seconds since the epoch."""
        number, step, epoch = len(self.steps), entry.get("step"), entry.get("epoch")
        has_step = is_number(step) and abs(step) < _LARGEST  # type: ignore[arg-type]
        self.steps.append(int(step) if has_step else -1)  # type: ignore[arg-type]
        self._epochs.append(epoch if is_number(epoch) else math.nan)  # type: ignore[arg-type]
        self._times.append(at_s)
        if not has_step:
            return
        is_summary = _TOTAL in entry
        for name, value in entry.items():
            if not is_number(value):
                continue
            self.names[name] = None
            if is_summary:
                continue
            if name not in self._columns:
                self._columns[name] = array("I"), array("d")
            numbers, values = self._columns[name]
            numbers.append(number)
            values.append(value)
        if is_summary and is_number(entry[_TOTAL]):
            self.total_s = entry[_TOTAL]

    def cut(self, num: int) -> None:
        """Remove all but the first `num` entries."""
        del self.steps[num:], self._epochs[num:], self._times[num:]
        for numbers, values in self._columns.values():
            position = bisect_left(numbers, num)
            del numbers[position:], values[position:]
        self._columns = {name: column for name, column in self._columns.items() if column[0]}

    def values(self, name: str) -> array[float]:
        """Return the numbers of that name in order, including NaN and infinite values."""
        return self._columns[name][1] if name in self._columns else array("d")

    def points(self, name: str) -> Iterator[Point]:
        """Yield (step, value) for each of `values`."""
        return ((self.steps[number], value) for number, value in zip(*self._columns.get(name, ((), ())), strict=True))

    def rows(self, name: str, positions: Iterable[int]) -> Iterator[tuple[int, float, float, float]]:
        """Yield (step, value, epoch, time) for some of `values`; epoch and time are NaN if unknown."""
        numbers, values = self._columns.get(name, ((), ()))
        for position in positions:
            number = numbers[position]
            yield self.steps[number], values[position], self._epochs[number], self._times[number]
