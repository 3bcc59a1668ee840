"""`journal.jsonl`: the events of a run, one JSON object per line, appended to its output folder as they happen.

A checkpoint contains the log up to its save. The journal also contains later entries, and what checkpoints do not
record: times, memory, stops. No run depends on it, and its lines are never rewritten. It is never the first file of a
folder: the first lines are kept in memory until there is another, such as a checkpoint. When a run is resumed, entries
that its checkpoint does not contain are superseded by those that follow. Each line has ``event`` and ``at``, in seconds
since the epoch:

``begin``: ``step``, ``resumed_from`` (a checkpoint or None), ``num_logged`` (entries in the log at that point),
``arguments`` (those that differ from their defaults), ``plan``, ``environment``, and from `extras.record` ``code``,
``seed``, ``parameters``, ``command``, ``config``; ``earlier`` (the log so far), if the checkpoint is in another folder.
``log``: ``entry`` as in `log_history`, ``samples`` and ``trained_s`` (samples, and seconds without evaluations and
saves, since ``begin``), ``memory`` (highest use so far in bytes: of the ``host``'s process, of the ``device``).
``save``: ``step``, ``name``, ``size`` in bytes.
``end``: ``step``, ``reason`` (None if all steps were done), ``is_error``.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hftrain.checkpoint.manifest import JOURNAL, PACKAGES
from hftrain.core.devices import device_name, peak_memory
from hftrain.core.extras import extra, installed_versions
from hftrain.core.launcher import read_launch
from hftrain.core.log import get_logger
from hftrain.core.state import Progress, TrainerState
from hftrain.preemption.signals import TrainingStopped
from hftrain.run.output import Output
from hftrain.storage.files import walk_files
from hftrain.strategies.base import Strategy

if sys.platform != "win32":
    import resource

logger = get_logger(__name__)

_MAX_REASON_CHARS = 500
_CALLBACK_STOP = "a callback set should_training_stop"


class Journal:
    """Append to the journal of the run that began last; only the main process writes.

    A failed write does not end the run; the first one logs a warning.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._progress, self._first_samples = Progress(), 0
        self._device = torch.device("cpu")
        self._trained_s, self._since_s = 0.0, 0.0
        self._is_paused = self._is_torn = self._has_warned = False
        self._pending = ""

    def begin(self, output: Output, strategy: Strategy, progress: Progress, **facts: Any) -> None:
        """Open the journal in the output folder, and append the ``begin`` event."""
        self._path, self._pending = None, ""
        if not strategy.is_main:
            return
        self._progress, self._first_samples, self._device = progress, progress.samples, strategy.device
        self._trained_s, self._since_s, self._has_warned = 0.0, time.perf_counter(), False
        self._path = output.folder / JOURNAL
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if output.url is not None:
                # Another machine may have added to it.
                extra("remote").RemoteFolder(output.url).mirror(JOURNAL, self._path)
            self._is_torn = _is_torn(self._path)
        except OSError as error:
            self._warn(error)
        self._append("begin", step=progress.step, **facts)

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append a ``log`` event."""
        if self._path is not None:
            self._append(
                "log",
                entry=dict(entry),
                samples=self._progress.samples - self._first_samples,
                trained_s=round(self._training_seconds(), 4),
                memory=_memory(self._device),
            )

    def save(self, path: Path, *, step: int, num_bytes: int) -> None:
        """Append a ``save`` event, after the commit of a checkpoint.

        Args:
            num_bytes: Its approximate size, used if the folder is not there.
        """
        if self._path is not None:
            size = sum(file.stat().st_size for file in walk_files(path) if file.is_file()) if path.is_dir() else 0
            self._append("save", step=step, name=path.name, size=size or num_bytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time within the context from the training time."""
        is_outer, self._trained_s = not self._is_paused, self._training_seconds()
        self._is_paused = True
        try:
            yield
        finally:
            if is_outer:
                self._is_paused, self._since_s = False, time.perf_counter()

    @contextmanager
    def ending(self, state: TrainerState) -> Iterator[None]:
        """Append an ``end`` event with the reason when the context ends."""
        try:
            yield
        except BaseException as error:
            error_name = "" if isinstance(error, TrainingStopped) else f"{type(error).__name__}: "
            reason = f"{error_name}{error}"[:_MAX_REASON_CHARS].rstrip(": ")
            self._append("end", step=state.global_step, reason=reason, is_error=isinstance(error, Exception))
            raise
        is_complete = state.global_step >= state.max_steps
        self._append("end", step=state.global_step, reason=None if is_complete else _CALLBACK_STOP, is_error=False)

    def _training_seconds(self) -> float:
        return self._trained_s if self._is_paused else self._trained_s + time.perf_counter() - self._since_s

    def _append(self, event: str, **facts: Any) -> None:
        if self._path is None:
            return
        line = json.dumps({"event": event, "at": round(time.time(), 3), **facts}, default=str, skipkeys=True) + "\n"
        self._pending += line
        try:
            # A script refuses to start in a folder that has files but no checkpoint: the journal is never the first.
            if all(sibling.name.startswith(".") for sibling in self._path.parent.iterdir()):
                return  # it is empty, or a first checkpoint is being written
            lines, self._pending = self._pending, ""
            # A single write, so that a concurrent reader, or a kill, leaves at most the last line incomplete.
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("\n" + lines if self._is_torn else lines)
            self._is_torn = False
        except OSError as error:
            self._is_torn = True
            if not self._path.parent.exists():
                self._path = None  # for example, a rehearsal has deleted its folder
            else:
                self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("Some entries could not be written to %s: %s. Training continues.", self._path, error)


def environment(strategy: Strategy) -> dict[str, Any]:
    """Return the versions, device and processes of a run, without names of machines or users."""
    device = strategy.device
    per_host = read_launch().local_world_size or 1
    return {
        "versions": {"python": platform.python_version(), **installed_versions(*PACKAGES)},
        "system": platform.platform(),
        "device": f"{device.type} ({device_name(device)})",
        "processes": strategy.world_size,
        "hosts": max(1, -(-strategy.world_size // per_host)),
        "strategy": strategy.name,
    }


def _memory(device: torch.device) -> dict[str, int]:
    memory = {}
    if sys.platform != "win32":
        peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        memory["host"] = peak_rss if sys.platform == "darwin" else peak_rss * 1024
    if (peak_bytes := peak_memory(device)) is not None:
        memory["device"] = peak_bytes
    return memory


def _is_torn(path: Path) -> bool:
    """Tell whether the last line of a file is incomplete, because its process was killed."""
    if not path.exists() or not path.stat().st_size:
        return False
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"
