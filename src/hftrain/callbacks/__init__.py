"""Callbacks: the documented base class, the runner that calls them, and those that come with a run."""

from __future__ import annotations

from hftrain.callbacks.base import ExportableState, TrainerCallback
from hftrain.callbacks.default_flow import DefaultFlowCallback
from hftrain.callbacks.early_stopping import EarlyStoppingCallback
from hftrain.callbacks.notebook import NotebookProgressCallback, in_notebook
from hftrain.callbacks.prediction_writer import PredictionWriter
from hftrain.callbacks.printer import PrinterCallback
from hftrain.callbacks.progress import ProgressCallback
from hftrain.callbacks.runner import CallbackRunner

__all__ = [
    "CallbackRunner",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "ExportableState",
    "NotebookProgressCallback",
    "PredictionWriter",
    "PrinterCallback",
    "ProgressCallback",
    "TrainerCallback",
    "default_callbacks",
    "in_notebook",
]


def default_callbacks(*, disable_tqdm: bool) -> list[TrainerCallback]:
    """Return what every run starts with: the default flow, then a display of progress.

    Args:
        disable_tqdm: Print logs instead of showing bars or a notebook's table.
    """
    if disable_tqdm:
        display: TrainerCallback = PrinterCallback()
    else:
        display = NotebookProgressCallback() if in_notebook() else ProgressCallback()
    return [DefaultFlowCallback(), display]
