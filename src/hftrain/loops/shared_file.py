"""One array for all processes of a machine, in a file that is mapped into the memory of each process."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy

from hftrain.loops.buffers import Array
from hftrain.loops.contract import Group

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SharedFile:
    """A new array that the processes of each machine fill together; collective.

    The file is unlinked once all have opened it, so it is not left behind if a process is killed while writing.

    Args:
        folder: The folder of the file.
        group: The processes.

    Attributes:
        writes_all: Whether this process writes all rows: the first process of each machine does.
        is_of_all: Whether all processes share one file, so that each writes its own rows.

    Raises:
        OSError: The disk does not have enough space.
    """

    def __init__(self, shape: Sequence[int], kind: numpy.dtype[Any], *, folder: Path, group: Group) -> None:
        self._kind, self._shape, self._group = kind, tuple(shape), group
        machines = group.gather_object(_machine())
        first = machines.index(machines[group.rank])
        folder.mkdir(parents=True, exist_ok=True)
        path = self._make(folder) if first == group.rank else None
        paths = group.gather_object(path)
        self._file = _open(paths[first])
        # Processes of one machine that see different folders, as in containers, have one file each.
        self.writes_all = path is not None or self._file is None
        shares = self._file is not None and machines == machines[:1] * len(machines)
        self.is_of_all = all(group.gather_object(shares))
        if path is not None:
            os.unlink(path)
        if self._file is None:
            own = self._make(folder)
            self._file = _open(own)
            os.unlink(own)

    def space(self) -> Array:
        """Return the array for writing."""
        return self._map("r+")

    def finished(self) -> Array:
        """Return the array once all have written it; later changes stay private to a process. Collective."""
        self._group.gather_object(None)
        array = self._map("c")
        assert self._file is not None
        self._file.close()
        return array

    def _map(self, mode: Any) -> Array:
        assert self._file is not None
        return numpy.memmap(self._file, self._kind, mode=mode, shape=self._shape)

    def _make(self, folder: Path) -> str:
        handle, path = tempfile.mkstemp(dir=folder, prefix=".predictions-")
        num_bytes = int(numpy.prod(self._shape, dtype=numpy.int64)) * self._kind.itemsize
        try:
            if hasattr(os, "posix_fallocate"):
                # A full disk then raises here; otherwise a signal would kill the process when it writes rows.
                os.posix_fallocate(handle, 0, num_bytes)
            else:
                os.truncate(handle, num_bytes)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(handle)
        return path


def _open(path: str) -> IO[bytes] | None:
    try:
        return open(path, "r+b")
    except OSError:
        return None


def _machine() -> str:
    """Return a name of this machine, unique among machines that share its folders."""
    return f"{platform.node()} {_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ''}"
