"""Progress bars drawn by `rich`."""

from __future__ import annotations

import atexit
import importlib
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any, TextIO

from hftrain.callbacks.lines import columns_of
from hftrain.callbacks.meters import Meter
from hftrain.callbacks.progress import ProgressCallback
from hftrain.core.optional import require


class RichProgressCallback(ProgressCallback):
    """Draw the bars of `ProgressCallback` with `rich`; add it in place of that callback.

    Output of `print()` and tracebacks appears above an open bar. If the output is not a terminal, it prints the same
    lines as `ProgressCallback`.

    Args:
        max_str_len: Longer texts in logs are cut on display.
        file: The output; standard output by default.

    Units:
        max_str_len: characters.

    Raises:
        MissingDependencyError: rich is not installed.

    Example:
        >>> trainer.remove_callback(ProgressCallback)  # doctest: +SKIP
        >>> trainer.add_callback(RichProgressCallback)  # doctest: +SKIP
    """

    def __init__(self, max_str_len: int = 100, *, file: TextIO | None = None) -> None:
        require("rich", feature="RichProgressCallback")
        super().__init__(max_str_len, file=file)
        self._console: Any = None
        self._live: Any = None
        self._shown: list[Meter] = []

    def _open(self, name: str, total: int | None, *, initial: int = 0, unit: str, leave: bool = True) -> Meter:
        file = self._file or sys.stdout
        draw = None if columns_of(file) is None else partial(self._draw, leave=leave)
        return Meter(name, total, initial=initial, unit=unit, file=file, draw=draw)

    def _draw(self, meter: Meter, *, leave: bool) -> Any:
        if not self._shown:
            self._console = importlib.import_module("rich.console").Console(file=meter.file)
            live = importlib.import_module("rich.live").Live
            self._live = live(get_renderable=self._render, console=self._console, auto_refresh=False, transient=True)
            self._live.start()
            # A failed run does not close the display, which hides the cursor.
            atexit.register(self._live.stop)
        self._shown.append(meter)
        self._live.refresh()
        # rich writes messages above the bar, so there is nothing to clear.
        return SimpleNamespace(refresh=self._live.refresh, clear=bool, close=partial(self._end, meter, leave=leave))

    def _end(self, meter: Meter, *, leave: bool) -> None:
        self._shown.remove(meter)
        if leave:
            self._console.print(meter.text(self._console.width - 1), markup=False)
        self._live.refresh()
        if not self._shown:
            self._live.stop()
            atexit.unregister(self._live.stop)

    def _render(self) -> Any:
        # rich would use the width of standard output, which may be another file.
        self._console.width = columns_of(self._file or sys.stdout) or 80
        lines = [meter.text(self._console.width - 1) for meter in self._shown]
        return importlib.import_module("rich.text").Text("\n".join(lines), style="bold")

    def _write(self, text: str, file: TextIO) -> None:
        if self._shown:
            self._console.print(text, markup=False, soft_wrap=True)
        else:
            super()._write(text, file)
