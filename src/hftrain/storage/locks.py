"""Folders that one run at a time writes to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.platform != "win32":
    import fcntl

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

    def take(self) -> bool:
        """Claim the folder; False if another lock, of this process or another, has it."""
        if sys.platform == "win32" or self._descriptor is not None:
            return True
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
