"""Meters: counts towards a total, shown as plain lines or by a bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TextIO

from tqdm import tqdm

from hftrain.callbacks.lines import seconds_text

REFRESH_S = 0.1
# Without a terminal: the shortest time between two lines, and the largest number of lines.
PLAIN_INTERVAL_S = 30.0
PLAIN_LINES = 10


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

    def write(self, text: str) -> None:
        """Write a line above the bar, as `tqdm.write` does."""
        tqdm.write(text, file=sys.stdout)

    def refresh(self) -> None:
        """Show the count now."""
        if self._bar is not None:
            self._bar.refresh()

    def set_description(self, text: str) -> None:
        """Change the name of what is counted."""
        self._name = text

    def set_postfix(self, values: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Show values behind the count."""
        self.fields = [f"{name} {value}" for name, value in {**(values or {}), **more}.items()]

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


class GivenMeter(Meter):
    """Advance the bar of a subclass."""

    def __init__(self, bar: Any) -> None:
        self.given = bar
        file = getattr(bar, "fp", sys.stderr)
        super().__init__("", bar.total, initial=bar.n, unit="step", file=file, draw=lambda meter: bar)

    def advance_to(self, n: int) -> None:
        """Set the count of the bar to `n`."""
        super().advance_to(n)
        self.given.update(n - self.given.n)


def bar_of(meter: Meter | None) -> Any:
    """Return what a subclass set as its bar, otherwise the meter."""
    return meter.given if isinstance(meter, GivenMeter) else meter


def meter_of(bar: Any) -> Meter | None:
    """Return a meter that advances a bar."""
    return bar if bar is None or isinstance(bar, Meter) else GivenMeter(bar)
