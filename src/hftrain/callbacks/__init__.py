"""Callbacks: the documented base class, the runner that calls them, and the default callbacks of a run."""

from __future__ import annotations

from hftrain.callbacks.base import ExportableState, TrainerCallback
from hftrain.callbacks.clipping import GradientClipping
from hftrain.callbacks.default_flow import DefaultFlowCallback
from hftrain.callbacks.early_stopping import EarlyStoppingCallback
from hftrain.callbacks.freezing import Freeze
from hftrain.callbacks.notebook import NotebookProgressCallback, in_notebook
from hftrain.callbacks.prediction_writer import PredictionWriter
from hftrain.callbacks.progress import PrinterCallback, ProgressCallback
from hftrain.callbacks.rich_progress import RichProgressCallback
from hftrain.callbacks.runner import CallbackHandler
from hftrain.callbacks.spikes import SpikeGuard
from hftrain.callbacks.summary import SummaryCallback

__all__ = [
    "CallbackHandler",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "ExportableState",
    "Freeze",
    "GradientClipping",
    "NotebookProgressCallback",
    "PredictionWriter",
    "PrinterCallback",
    "ProgressCallback",
    "RichProgressCallback",
    "SpikeGuard",
    "SummaryCallback",
    "TrainerCallback",
    "in_notebook",
    "progress_callback",
]


def progress_callback(*, disable_tqdm: bool) -> TrainerCallback:
    """Return the callback that shows a run's progress, the last of its callbacks.

    Args:
        disable_tqdm: Print logs instead of showing bars or a notebook's table.
    """
    if disable_tqdm:
        return PrinterCallback()
    return NotebookProgressCallback() if in_notebook() else ProgressCallback()
