"""Choice of the trackers that a run reports to, and images as they take them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hftrain.core.elsewhere import tracker_of
from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.log import get_logger, warn_once
from hftrain.extras.trackers.callbacks import TrackerCallback, reports_to_tracker, tracker_callback
from hftrain.loggers.base import Logger
from hftrain.loggers.registry import available_loggers
from hftrain.loggers.registry import loggers as known_loggers
from hftrain.storage.files import is_url

logger = get_logger(__name__)


def with_trackers(args: Any, callbacks: Sequence[Any], loggers: Any, *, is_rehearsal: bool) -> list[Any]:
    """Return the callbacks of the chosen trackers, followed by the user's; no tracker is started."""
    trackers = trackers_asked(args, loggers)
    if loggers is None:
        args.report_to = [str(name) for name in trackers]
    reporting = tracker_callbacks(trackers, besides=callbacks)
    if is_rehearsal:
        return without_trackers([*reporting, *callbacks])
    folder = str(args.output_dir)
    if not all(isinstance(callback, TrackerCallback) for callback in reporting) and not is_url(folder):
        # Callbacks of transformers write to the folder, which its Trainer creates at once.
        Path(folder).mkdir(parents=True, exist_ok=True)
    return [*reporting, *callbacks]


def without_trackers(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks, given as classes or instances, without those that report to a tracker."""
    return [callback for callback in callbacks if not reports_to_tracker(_kind(callback))]


def trackers_asked(args: Any, given: Any = None) -> list[str | Logger]:
    """Return the names (or loggers) of the trackers that a run reports to.

    None means all that are installed, as documented; the log names them. A Kubeflow TrainJob is always reported to.

    Args:
        given: The `loggers` argument of the Trainer; takes precedence over `report_to`.
    """
    requested = args.report_to if given is None else given
    if requested is None:
        names = available_loggers()
        if names and args.process_index == 0:
            logger.info(
                "report_to was not given, so this run reports to all installed trackers: %s. Set report_to='none' for "
                "none, or name those you want.",
                ", ".join(names),
            )
        return list(names)
    requested = list(requested) if isinstance(requested, Iterable) and not isinstance(requested, str) else [requested]
    trackers: list[str | Logger] = []
    for tracker in requested:
        if tracker != "none":
            trackers += available_loggers() if tracker == "all" else [_checked_tracker(tracker)]
    # The environment of a Kubeflow TrainJob requests reports.
    job: Any = known_loggers.resolve("kubeflow")[0]
    if job.why_off() is None and job.missing_packages():
        warn_once("The Kubeflow TrainJob hears no progress: install transformers, whose callback reports it.")
    elif job.why_off() is None:
        trackers.append("kubeflow")
    return list(filter(_is_on, dict.fromkeys(trackers)))


def tracker_callbacks(trackers: Sequence[str | Logger], *, besides: Sequence[Any]) -> list[Any]:
    """Return the callbacks that report to trackers; nothing is started.

    Args:
        besides: The user's own callbacks; a tracker that one of them reports to is left out.
    """
    kinds = set(map(_kind, besides))
    reported = {kind.tracker for kind in kinds if issubclass(kind, TrackerCallback)}
    missing = [tracker for tracker in trackers if isinstance(tracker, Logger) or tracker not in reported]
    callbacks = [_library_callback(tracker) or tracker_callback(tracker) for tracker in missing]
    return [new for new in callbacks if not (isinstance(new, type) and any(issubclass(kind, new) for kind in kinds))]


def _kind(callback: Any) -> type:
    """Return the class of a callback, which may be given as one."""
    return callback if isinstance(callback, type) else type(callback)


def _library_callback(tracker: str | Logger) -> Any:
    """Return the callback, or its class, that a library gave transformers for a tracker's name; None without one."""
    replacement = tracker_of(tracker) if isinstance(tracker, str) else None
    owner = getattr(replacement, "__module__", "").split(".")[0]
    return None if owner in ("hftrain", "transformers") else replacement


def _checked_tracker(tracker: Any) -> Any:
    """Return a tracker or its name unchanged; raise for anything else."""
    if isinstance(tracker, str):
        _ = _library_callback(tracker) or known_loggers.summary(tracker)
    elif not isinstance(tracker, Logger):
        kind = f"the class {tracker.__name__}" if isinstance(tracker, type) else f"a {type(tracker).__name__}"
        raise ConfigError(
            f"Cannot use {kind} as a logger:",
            "it is neither a tracker's name nor a Logger.",
            "Pass names, or instances of classes that derive from hftrain.Logger.",
        )
    elif type(tracker).log is Logger.log and type(tracker).start is Logger.start:
        warn_once(f"{type(tracker).__name__} reports no metric: it does not define log(self, metrics, step).")
    return tracker


def _is_on(tracker: str | Logger) -> bool:
    """Tell whether this machine can report to a tracker, and warn if not; a logger of the user's is always on."""
    if isinstance(tracker, Logger) or _library_callback(tracker):
        return True
    kind: Any = known_loggers.resolve(tracker)[0]
    if (reason := kind.why_off()) is not None:
        warn_once(f"Cannot report to tracker {tracker!r}, because {reason}: nothing is reported to it.")
    return reason is None


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
