"""Hash large files while they are written, so that they are not read again for their hash."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, cast

import numpy

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Identifies a file and its version; see `mark`.
Mark = tuple[int, ...]

_PIECE_BYTES = 1 << 22
_BACKWARDS_NS = 2_000_000_000
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux

_notes: ContextVar[dict[Mark, str] | None] = ContextVar("hftrain_hashes", default=None)


@contextlib.contextmanager
def noting() -> Iterator[dict[Mark, str]]:
    """Make `create` hash the files that this thread writes; yields their SHA-256 by `mark`."""
    notes: dict[Mark, str] = {}
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def mark(status: os.stat_result) -> Mark:
    """Return a key that identifies a file, and that differs once the file was changed or moved."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextlib.contextmanager
def create(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file for sequential writing; within `noting` it is hashed, and durable when closed."""
    notes = _notes.get()
    if notes is None:
        with open(path, "wb") as stream:
            yield stream
        return
    with open(path, "wb", buffering=0) as raw, ThreadPoolExecutor(1, "hftrain-hash") as pool:
        file = _Hashed(raw, pool)
        yield cast("IO[bytes]", file)
        digest = file.finish()
        os.fsync(raw.fileno())
    status = path.stat()
    # The clock for file times ticks every few milliseconds. A change within the tick of the last write would not change
    # the time, so the time is moved to the past, where no later change can set it.
    with contextlib.suppress(OSError):  # some network file systems cannot
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - _BACKWARDS_NS))
        backdated = path.stat()
        if backdated.st_mtime_ns < status.st_mtime_ns:
            notes[mark(backdated)] = digest


class _Hashed(io.RawIOBase):
    """Copy the data into blocks, and write each block while a thread hashes it.

    Both see the same bytes even if the memory changes meanwhile. If the file system allows it, writes bypass the page
    cache, whose pages would cost more time than the hash.
    """

    def __init__(self, raw: io.FileIO, pool: ThreadPoolExecutor) -> None:
        self._raw, self._pool = raw, pool
        self._digest = hashlib.sha256()
        # Page-aligned, as direct writes need it; one block is filled while the previous one is hashed.
        self._pieces = [numpy.frombuffer(mmap.mmap(-1, _PIECE_BYTES), numpy.uint8) for _ in range(2)]
        self._hashed: Future[None] | None = None
        self._fill = 0
        self._is_direct: bool | None = None  # until the first full block

    def write(self, data: Any) -> int:
        """Write bytes; they may change afterwards."""
        rest = numpy.frombuffer(data, numpy.uint8)
        num_bytes = len(rest)
        while len(rest):
            part = rest[: _PIECE_BYTES - self._fill]
            self._pieces[0][self._fill : self._fill + len(part)] = part  # releases the GIL, unlike bytes
            self._fill += len(part)
            rest = rest[len(part) :]
            if self._fill == _PIECE_BYTES:
                self._flush_piece()
        return num_bytes

    def finish(self) -> str:
        """Write the rest, and return the SHA-256 of the file."""
        if self._is_direct:  # its last block may be partial
            self._set_direct(False)
        self._flush_piece()
        if self._hashed is not None:
            self._hashed.result()
        return self._digest.hexdigest()

    def _flush_piece(self) -> None:
        piece = self._pieces[0].data[: self._fill]
        if self._is_direct is None and self._fill == _PIECE_BYTES:
            self._set_direct(True)
        pending, self._hashed = self._hashed, self._pool.submit(self._digest.update, piece)
        while piece:
            try:
                piece = piece[self._raw.write(piece) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._set_direct(False)
        if pending is not None:
            pending.result()
        self._pieces.reverse()
        self._fill = 0

    def _set_direct(self, is_direct: bool) -> None:
        self._is_direct = False
        if _DIRECT and fcntl is not None:
            with contextlib.suppress(OSError):
                flags = fcntl.fcntl(self._raw, fcntl.F_GETFL) & ~_DIRECT
                fcntl.fcntl(self._raw, fcntl.F_SETFL, flags | (_DIRECT if is_direct else 0))
                self._is_direct = is_direct
