"""The files of a flight log: lines that are appended, compressed and uploaded, with failures that end no run."""

from __future__ import annotations

import gzip
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hftrain.core.extras import extra
from hftrain.core.log import warn_once
from hftrain.extras.flight.reading import FOLDER, MIN_STEPS, WINDOW, limit_of
from hftrain.storage.files import is_url, local_folder


class Ledger:
    """The lines of one process, ``rank0.jsonl`` and older ones compressed next to it.

    With a remote output folder they are written into its local mirror, which continues the remote file, and which the
    run uploads on the main process's machine. On others they are uploaded here.
    """

    def __init__(self, output_dir: str, *, strategy: Any, rotate_bytes: int) -> None:
        self.folder = local_folder(output_dir, start=Path.cwd()) / FOLDER
        self.name = f"rank{strategy.rank}"
        self._path = self.folder / f"{self.name}.jsonl"
        self._rotate_bytes = rotate_bytes
        self._remote = extra("remote").RemoteFolder(output_dir) if is_url(output_dir) else None
        self._uploads_itself = self._remote is not None and strategy.rank != strategy.local_rank
        if self._remote is not None:
            with quiet(self.folder):
                self._continue(self._remote)

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write lines; after a line that a killed process left unfinished, on a new one."""
        text = "".join(json.dumps(line, default=str) + "\n" for line in lines)
        with quiet(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab+") as file:
                is_torn = file.tell() and file.seek(-1, 2) >= 0 and file.read() != b"\n"
                file.write(("\n" + text if is_torn else text).encode())
                is_full = file.tell() > self._rotate_bytes
            if is_full:
                _archive(self._path)

    def send(self, *, is_last: bool = False) -> None:
        """Upload what this process has written, if nobody else does: on another machine, or after the run's end."""
        if self._remote is not None and (self._uploads_itself or is_last):
            with quiet(self.folder):
                for path in self.folder.glob(f"*{self.name}.*"):
                    self._remote.upload(path, f"{FOLDER}/{path.name}")

    def _continue(self, remote: Any) -> None:
        """Fetch what the run has written on another machine: a file only ever grows."""
        for name, size in remote.sizes(FOLDER).items():
            path = self.folder / name
            if name.startswith(f"{self.name}.") and (not path.exists() or path.stat().st_size < size):
                remote.download(f"{FOLDER}/{name}", path)


class RecentSteps:
    """The losses and norms of the last 128 steps."""

    def __init__(self) -> None:
        self._windows = deque[float](maxlen=WINDOW), deque[float](maxlen=WINDOW)

    def add(self, loss: float, norm: float | None) -> bool:
        """Return whether a step stands out from those before it, and add it to them."""
        is_spike = False
        for value, window in zip((loss, 0.0 if norm is None else norm), self._windows, strict=True):
            is_spike |= len(window) >= MIN_STEPS and not value <= limit_of(window)
            if math.isfinite(value):
                window.append(value)
        return is_spike


@contextmanager
def quiet(folder: Path) -> Iterator[None]:
    """Turn a failed write into one warning."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        warn_once(f"Some of the flight log could not be written to {folder}: {error}. Training continues.")


def _archive(path: Path) -> None:
    number = len(list(path.parent.glob(f"{path.stem}.*.jsonl.gz")))
    target = path.with_name(f"{path.stem}.{number:04d}.jsonl.gz")
    target.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()
