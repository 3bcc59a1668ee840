"""Folders that one run at a time writes to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hftrain.storage.locks import FolderLock

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be locked there")

HOLDER = """
import os, sys, time
from pathlib import Path
from hftrain.storage.locks import FolderLock
assert FolderLock(Path(sys.argv[1])).take()
child = os.fork()  # as a loader's worker is, that outlives its parent
if child == 0:
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""


@contextmanager
def holder(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the numbers of a process that has claimed a folder, and of one that was forked from it since."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process.pid, child
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


def test_folder_is_claimed_once_until_it_is_released(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    first, second = FolderLock(folder), FolderLock(folder)
    assert first.take()
    assert first.take()
    assert not second.take()
    first.release()
    first.release()
    assert second.take()
    assert list(folder.iterdir()) == []
    second.release()


def test_claim_of_another_process_ends_with_it_and_not_with_its_children(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with holder(tmp_path) as (process, child):
        assert not lock.take()
        os.kill(process, signal.SIGKILL)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        os.kill(child, 0)
        # The child gives the folder up once it runs, which on a busy machine may be later.
        deadline_s = time.monotonic() + 30
        while not lock.take() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert not FolderLock(tmp_path).take()
        os.kill(child, 0)
        assert lock.take()
        lock.release()


def test_folder_that_cannot_be_locked_is_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", refuse)  # as some file systems of networks answer
    locks = [FolderLock(tmp_path), FolderLock(tmp_path)]
    assert all(lock.take() for lock in locks)
