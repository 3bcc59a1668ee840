"""Folders that one run at a time writes to."""

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
    """Claim a local folder for this process, until it is released or the process ends, however that is.

    Nothing is written. Where the system, or a network's file system, cannot lock folders, every claim is granted.

    Args:
        folder: The folder; it is created when it is claimed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor: int | None = None
        self._wait: Callable[[], object] | None = None

    def take(self) -> bool:
        """Claim the folder; False if another lock, of this process or another, has it."""
        if sys.platform == "win32" or self._descriptor is not None:
            return True
        self.settle()
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
        """Say that the run has ended and still writes; `wait` returns when that is done, and the folder released."""
        self._wait = wait

    def settle(self) -> None:
        """Wait for what an interrupted run of this process still writes to the folder."""
        for lock in [*_held]:
            if lock._wait is not None and lock.folder.resolve() == self.folder.resolve():
                logger.warning("Waiting for the checkpoint that the interrupted run still writes to %s.", self.folder)
                lock._wait()

    def release(self) -> None:
        """Give the folder up; safe to call twice, and from any thread."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
            _held.discard(self)


def _let_go() -> None:
    """In a forked process, such as a loader's worker that outlives a killed run: it claims nothing."""
    for lock in [*_held]:
        lock.release()  # the parent's claim lasts: it ends with the last process that has it open


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
