"""Hashes of files that were written a moment ago: known without reading them again, and never those of other bytes."""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import mmap
import os
import time
from pathlib import Path

import numpy
import pytest

from hftrain.storage import hashing
from hftrain.storage.hashing import create, mark, noting

PIECE = 1 << 22


def random_bytes(num: int) -> bytes:
    return numpy.random.default_rng(num).bytes(num)


def written(path: Path, *parts: bytes) -> dict[hashing.Mark, str]:
    with noting() as notes, create(path) as file:
        for part in parts:
            assert file.write(part) == len(part)
    return notes


def test_memory_may_change_as_soon_as_it_was_handed_over(tmp_path):
    room = numpy.zeros(3 * PIECE + 5, numpy.uint8)
    with noting() as notes, create(tmp_path / "a") as file:
        for value in range(4):
            room[:] = value
            file.write(room)
    data = (tmp_path / "a").read_bytes()
    assert data == b"".join(bytes([value]) * len(room) for value in range(4))
    assert list(notes.values()) == [hashlib.sha256(data).hexdigest()]


@pytest.mark.parametrize("kind", ["overwritten", "mapped", "appended", "replaced", "moved", "copied back"])
def test_changed_file_has_another_mark(tmp_path, kind):
    """Within the same tick of the clock and with the same size, too: so it is tried often.

    Newer kernels tick as often as somebody looks; for the others the noted time must be one that no change leaves.
    """
    path, other = tmp_path / "a", tmp_path / "b"
    for _ in range(20):
        start_ns = time.time_ns()
        notes = written(path, b"x" * 100)
        assert path.stat().st_mtime_ns < start_ns - 10**9
        if kind in ("overwritten", "mapped"):
            with open(path, "r+b") as file:
                if kind == "overwritten":
                    file.write(b"y")
                else:
                    with mmap.mmap(file.fileno(), 0) as mapped:
                        mapped[0:1] = b"y"
        elif kind == "appended":
            with open(path, "ab") as file:
                file.write(b"y")
        elif kind == "moved":
            path.rename(other)
            other.rename(path)
        else:
            other.write_bytes(b"y" * 100)
            if kind == "copied back":
                os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
            other.replace(path)
        assert mark(path.stat()) not in notes
    assert mark(path.stat()) not in notes


class Refusing(io.FileIO):
    """Stands in for a file system that takes the flag for writes past the cache, and then refuses the writes."""

    def write(self, data):
        if hashing.fcntl.fcntl(self, hashing.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().write(data[:1000])


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system writes through its cache only")
def test_writes_past_the_cache_that_are_refused_go_through_it(tmp_path, monkeypatch):
    data = random_bytes(2 * PIECE + 9)
    monkeypatch.setattr(hashing, "open", lambda path, mode, **options: Refusing(path, mode), raising=False)
    notes = written(tmp_path / "a", data)
    assert (tmp_path / "a").read_bytes() == data
    assert list(notes.values()) == [hashlib.sha256(data).hexdigest()]


def test_writes_that_are_refused_in_any_way_are_an_error(tmp_path, monkeypatch):
    class Deaf(io.FileIO):
        """Refuses every write, until somebody would ask for ever."""

        answers = itertools.chain([errno.EINVAL] * 5, itertools.repeat(errno.EIO))

        def write(self, data):
            raise OSError(next(self.answers), "refused")

    monkeypatch.setattr(hashing, "open", lambda path, mode, **options: Deaf(path, mode), raising=False)
    with pytest.raises(OSError, match="refused") as caught:
        written(tmp_path / "a", random_bytes(PIECE))
    assert caught.value.errno == errno.EINVAL


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no device that is always full")
@pytest.mark.parametrize("num_bytes", [1, PIECE, 3 * PIECE])
def test_full_disk_is_an_error_of_the_write(num_bytes):
    with pytest.raises(OSError, match="No space left") as caught, noting(), create(Path("/dev/full")) as file:
        file.write(random_bytes(num_bytes))
    assert caught.value.errno == errno.ENOSPC
