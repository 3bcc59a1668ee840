"""Callbacks: the documented base class, the runner that calls them, and the default callbacks of a run."""

from __future__ import annotations

from typing import Any

from hftrain.callbacks.base import ExportableState, TrainerCallback
from hftrain.callbacks.default_flow import DefaultFlowCallback, PrinterCallback
from hftrain.callbacks.runner import CallbackHandler
from hftrain.core.elsewhere import default_of
from hftrain.core.extras import extra

__all__ = [
    "CallbackHandler",
    "DefaultFlowCallback",
    "ExportableState",
    "PrinterCallback",
    "TrainerCallback",
    "default_callbacks",
    "progress_callback",
]


def default_callbacks() -> list[Any]:
    """Return the callbacks, or their classes, that every run has first."""
    return list(default_of("DEFAULT_CALLBACKS", [DefaultFlowCallback]))


def progress_callback(*, disable_tqdm: bool) -> Any:
    """Return the callback, or its class, that shows a run's progress, the last of its callbacks.

    In a notebook it is that of transformers, with a table of the metrics, where transformers is installed.

    Args:
        disable_tqdm: Print logs instead of showing bars or a notebook's table.
    """
    if disable_tqdm:
        return default_of("PrinterCallback", PrinterCallback)
    return default_of("DEFAULT_PROGRESS_CALLBACK", extra("progress").display())
