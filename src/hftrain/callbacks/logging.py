"""What callbacks log: numbers, images, texts and tables, from the main process to the trackers of a run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hftrain.core.extras import extra
from hftrain.core.metrics import as_entry


class RunLogger:
    """The `logger` that every callback receives: it reports to all trackers of the run, with the current step.

    Only the main process reports, so callbacks may call it on all. A tracker that takes no images, texts or tables is
    named once in a warning. Outside of callbacks it is `trainer.callback_handler.logger`.

    Example:
        >>> from hftrain import TrainerCallback
        >>> class Weights(TrainerCallback):
        ...     def on_evaluate(self, args, state, control, model, logger, **kwargs):
        ...         logger.log_image("weights", model.weight)
    """

    def __init__(self, handler: Any, journal: Callable[[Mapping[str, Any]], None]) -> None:
        # No circle: deleting a Trainer ends its trackers.
        self._handler, self._journal = weakref.proxy(handler), journal

    def log(self, metrics: Mapping[str, float]) -> None:
        """Report numbers and add them to `state.log_history`; calls no `on_log` of other callbacks."""
        state = self._handler.state
        entry = as_entry({**metrics}, state)
        state.log_history.append(entry)
        self._journal(entry)
        self._report("log", {name: entry[name] for name in metrics})

    def log_image(self, name: str, image: Any) -> None:
        """Report an image: a tensor (channels, height, width) or an array (height, width, channels).

        Without channels it is grey. Values are bytes, or numbers from 0 to 1; others are clipped.
        """
        self._report("log_image", name, image, prepare=extra("trackers").as_pixels)

    def log_text(self, name: str, text: str) -> None:
        """Report a text."""
        self._report("log_text", name, text)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Report a table of numbers and texts."""
        self._report("log_table", name, list(columns), [list(row) for row in rows])

    def _report(self, method: str, *values: Any, prepare: Callable[[Any], Any] | None = None) -> None:
        handler = self._handler
        calls = [call for callback in handler.callbacks if (call := getattr(callback, "report_logged", None))]
        if calls and handler.state.is_world_process_zero:
            values = values if prepare is None else (*values[:-1], prepare(values[-1]))
            for call in calls:
                call(method, handler.args, handler.state, handler.model, *values)
