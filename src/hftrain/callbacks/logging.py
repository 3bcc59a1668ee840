"""What callbacks log: numbers, images, texts and tables, from the main process to the trackers of a run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hftrain.core.errors import TaskError


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
        logs = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        entry = {**logs, "epoch": state.epoch or 0.0, "step": state.global_step}
        state.log_history.append(entry)
        self._journal(entry)
        self._report("log", logs)

    def log_image(self, name: str, image: Any) -> None:
        """Report an image: a tensor (channels, height, width) or an array (height, width, channels).

        Without channels it is grey. Values are bytes, or numbers from 0 to 1; others are clipped.
        """
        self._report("log_image", name, image, prepare=as_pixels)

    def log_text(self, name: str, text: str) -> None:
        """Report a text."""
        self._report("log_text", name, text)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Report a table of numbers and texts."""
        self._report("log_table", name, list(columns), [list(row) for row in rows])

    def _report(self, kind: str, *values: Any, prepare: Callable[[Any], Any] | None = None) -> None:
        handler = self._handler
        calls = [call for each in handler.callbacks if (call := getattr(each, "report_logged", None))]
        if calls and handler.state.is_world_process_zero:
            values = values if prepare is None else (*values[:-1], prepare(values[-1]))
            for call in calls:
                call(kind, handler.args, handler.state, handler.model, *values)


def as_pixels(image: Any) -> np.ndarray[Any, Any]:
    """Return an image as bytes (height, width, 3 or 4 channels)."""
    is_tensor = isinstance(image, torch.Tensor)
    pixels = np.asarray(image.detach().float().cpu() if is_tensor and image.is_floating_point() else image)
    if is_tensor and pixels.ndim == 3:
        pixels = pixels.transpose(1, 2, 0)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4):
        raise TaskError(
            f"Cannot log an image of shape {tuple(pixels.shape)}.",
            "A tensor is (channels, height, width), an array (height, width, channels), with 1, 3 or 4 channels.",
            "Log one image, with its axes in this order.",
        )
    if pixels.dtype.kind == "f":
        pixels = np.clip(np.nan_to_num(pixels), 0, 1) * 255 + 0.5
    pixels = pixels.astype(np.uint8)
    return pixels.repeat(3, axis=2) if pixels.shape[2] == 1 else pixels
