"""Local folders for runs whose output folder is remote."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from hftrain.storage.files import walk_files
from hftrain.storage.remote import RemoteFolder, is_url

CACHE_VARIABLE = "HFTRAIN_CACHE"


def mirror_of(url: str) -> Path:
    """Return the local folder for a remote one: always the same for a URL, with the same last name.

    It is in ``mirrors/`` of the folder in the environment variable `HFTRAIN_CACHE`, by default of ``hftrain`` in the
    user's cache (`XDG_CACHE_HOME`, ``~/.cache``). It may be deleted between two runs.
    """
    url = url.rstrip("/")
    own = os.environ.get(CACHE_VARIABLE)
    cache = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hftrain"
    return cache.absolute() / "mirrors" / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rpartition("/")[2]


def local_folder(folder: str | Path, *, start: Path) -> Path:
    """Return where a folder is written: the mirror of a remote one; a local one relative to `start`."""
    text = str(folder)
    return mirror_of(text) if is_url(text) else start / text.removeprefix("file://")


class Mirror:
    """The local folder of a remote one; new files in it are uploaded.

    Files of earlier processes are not uploaded: the remote folder may already contain newer ones.

    Args:
        is_left_out: Tells from a part of a file's path whether to exclude the file; hidden files always are.
    """

    def __init__(self, url: str, *, is_left_out: Callable[[str], bool]) -> None:
        self.url = url
        self.folder = mirror_of(url)
        self._is_left_out = is_left_out
        self._published = self._stamps()
        self._lock = threading.Lock()

    def publish(self) -> None:
        """Upload the files written since the last call, or since this object was created; from any thread."""
        with self._lock:
            for name, stamp in self._stamps().items():
                if self._published.get(name) != stamp:
                    RemoteFolder(self.url).upload(self.folder / name, name)
                    self._published[name] = stamp

    def _stamps(self) -> dict[str, tuple[int, int, int]]:
        """Map each file to a key that changes when it is written or replaced, even within one clock tick."""
        found = {}
        for path in walk_files(self.folder):
            name = path.relative_to(self.folder)
            if path.is_file() and not any(part.startswith(".") or self._is_left_out(part) for part in name.parts):
                stat = path.stat()
                found[name.as_posix()] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        return found
