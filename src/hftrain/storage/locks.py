"""Locks that let only one run at a time write to a folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from hftrain.core.log import get_logger

if sys.platform != "win32":
    import fcntl

logger = get_logger(__name__)

_held: set[FolderLock] = set()


class FolderLock:
    """Lock a local folder for this process, until it is released or the process ends for any reason.

    Nothing is written. If the system, or a network file system, cannot lock folders, every lock is granted.

    Args:
        folder: The folder; created when it is locked.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor: int | None = None
        self._wait: Callable[[], object] | None = None

    def take(self) -> bool:
        """Lock the folder; False if this process or another has already locked it."""
        if sys.platform == "win32" or self._descriptor is not None:
            return True
        self.wait_for_writer()
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            return not isinstance(error, BlockingIOError)
        self._descriptor = descriptor
        _held.add(self)
        return True

    def linger(self, wait: Callable[[], object]) -> None:
        """Mark the run as ended but still writing; `wait` returns when that is done and the folder is released."""
        self._wait = wait

    def wait_for_writer(self) -> None:
        """Wait until an interrupted run of this process has finished writing to the folder."""
        for lock in [*_held]:
            if lock._wait is not None and lock.folder.resolve() == self.folder.resolve():
                logger.warning("Waiting for the checkpoint that the interrupted run still writes to %s.", self.folder)
                lock._wait()

    def release(self) -> None:
        """Release the folder; safe to call twice, and from any thread."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
            _held.discard(self)


def _let_go() -> None:
    """Release the locks in a forked process, such as a loader worker that outlives a killed run."""
    for lock in [*_held]:
        lock.release()  # the parent keeps its lock until the last process with the open file ends


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
