"""Callbacks: the documented base class, the runner that calls them, and the default callbacks of a run."""

from __future__ import annotations

from typing import Any

from hftrain.callbacks.base import ExportableState, TrainerCallback
from hftrain.callbacks.default_flow import DefaultFlowCallback
from hftrain.callbacks.early_stopping import EarlyStoppingCallback
from hftrain.callbacks.notebook import NotebookProgressCallback, in_notebook
from hftrain.callbacks.progress import PrinterCallback, ProgressCallback
from hftrain.callbacks.rich_progress import RichProgressCallback
from hftrain.callbacks.runner import CallbackHandler
from hftrain.callbacks.summary import SummaryCallback
from hftrain.core.replaced import default_of

__all__ = [
    "CallbackHandler",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "ExportableState",
    "NotebookProgressCallback",
    "PrinterCallback",
    "ProgressCallback",
    "RichProgressCallback",
    "SummaryCallback",
    "TrainerCallback",
    "default_callbacks",
    "in_notebook",
    "progress_callback",
]


def default_callbacks() -> list[Any]:
    """Return the callbacks, or their classes, that every run has first."""
    return list(default_of("DEFAULT_CALLBACKS", [DefaultFlowCallback]))


def progress_callback(*, disable_tqdm: bool) -> Any:
    """Return the callback, or its class, that shows a run's progress, the last of its callbacks.

    Args:
        disable_tqdm: Print logs instead of showing bars or a notebook's table.
    """
    if disable_tqdm:
        return default_of("PrinterCallback", PrinterCallback)
    return default_of("DEFAULT_PROGRESS_CALLBACK", NotebookProgressCallback if in_notebook() else ProgressCallback)
