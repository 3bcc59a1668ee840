"""A folder of a remote store, through fsspec (``s3://``, ``gs://``, ``memory://``, ...), and its local mirror."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.storage.files import check_url, mirror_of, walk_files

# Seconds between attempts, in addition to retries of the store's package.
_WAITS_S = (0.5, 1.0, 2.0, 4.0)
_NOT_RETRIED = (FileNotFoundError, PermissionError, NotImplementedError, ValueError, TypeError)

logger = get_logger(__name__)


class RemoteFolder:
    """Read and write the files of one remote folder; names are relative to it, with slashes.

    Failed requests are tried five times in all, unless a retry cannot help. After that, methods raise `OSError`:
    `FileNotFoundError` if there is no such file, another one if the store cannot be used.
    """

    def __init__(self, url: str) -> None:
        check_url(url)
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        # The only store that does not create folders by itself.
        options = {"auto_mkdir": True} if self.url.startswith("local:") else {}
        self._fs, self._root = url_to_fs(self.url, **options)
        self._root = self._root.rstrip("/")

    def check_writable(self) -> None:
        """Check that a file can be written here and deleted again."""
        # Always the same name, so that leftovers of a kill are overwritten.
        try:
            self.write(".write-test", "test")
            self.delete_file(".write-test")
        except OSError as error:
            raise ConfigError(
                f"Cannot write to {self.url!r}.",
                f"{type(error).__name__}: {str(error).rstrip('.')}.",
                "Check that the bucket or folder exists, and that the credentials may write to it.",
            ) from error

    def names(self) -> list[str]:
        """List the direct children of the folder, sorted; empty if it does not exist."""
        try:
            return sorted({Path(entry["name"].rstrip("/")).name for entry in self._request("ls", "", detail=True)})
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        """Map the files below a folder, by relative name, to their sizes in bytes; empty if there are none."""
        root = self._path(folder) + "/"
        try:
            entries = self._request("find", folder, detail=True)
        except FileNotFoundError:
            return {}
        return {path.partition(root)[2]: int(entry["size"] or 0) for path, entry in entries.items() if root in path}

    def upload(self, path: Path, name: str) -> None:
        """Upload a local file; complete on return."""
        self._call_with_retries("put_file", name, str(path), self._path(name))

    def write(self, name: str, text: str) -> None:
        """Write a small file."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text"
            path.write_text(text, encoding="utf-8")
            self.upload(path, name)

    def download(self, name: str, path: Path) -> None:
        """Download a file to a local path, whose folder is created if needed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._call_with_retries("get_file", name, self._path(name), str(path))

    def mirror(self, name: str, path: Path) -> None:
        """Download a file to a local path; if there is no such file, delete that at the path."""
        try:
            self.download(name, path)
        except FileNotFoundError:
            path.unlink(missing_ok=True)

    def delete_file(self, name: str) -> None:
        """Delete a file, if it exists."""
        with suppress(FileNotFoundError):
            self._request("rm_file", name)

    def delete_folder(self, name: str) -> None:
        """Delete a folder and its contents, if it exists."""
        with suppress(FileNotFoundError):
            self._request("rm", name, recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _request(self, method: str, name: str, **options: Any) -> Any:
        # Others write here too, and some stores cache listings.
        self._fs.invalidate_cache()
        return self._call_with_retries(method, name, self._path(name), **options)

    def _call_with_retries(self, method: str, name: str, *arguments: str, **options: Any) -> Any:
        description = f"{method} {name}"
        for wait_s in (*_WAITS_S, None):
            try:
                with _same_random_numbers():
                    return getattr(self._fs, method)(*arguments, **options)
            except _NOT_RETRIED as error:
                if isinstance(error, OSError):
                    raise
                raise OSError(f"{description}: {type(error).__name__}: {error}") from error
            except Exception as error:
                if wait_s is None:
                    raise OSError(f"{description}: {type(error).__name__}: {error}") from error
                logger.warning("%s: %s failed, and is tried again: %r", self.url, description, error)
                # Random, because many processes may have had the same failure.
                time.sleep(wait_s * random.SystemRandom().uniform(0.5, 1.5))
        raise AssertionError


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore Python's random generator: store packages draw their retry delays from it.

    Otherwise training would continue with different numbers after a network failure. In a background thread, training
    uses the generator at the same time, so it cannot be restored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


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
        self._published = self._file_stamps()
        self._lock = threading.Lock()

    def publish(self) -> None:
        """Upload the files written since the last call, or since this object was created; from any thread."""
        with self._lock:
            for name, stamp in self._file_stamps().items():
                if self._published.get(name) != stamp:
                    RemoteFolder(self.url).upload(self.folder / name, name)
                    self._published[name] = stamp

    def _file_stamps(self) -> dict[str, tuple[int, int, int]]:
        """Map each file to a key that changes when it is written or replaced, even within one clock tick."""
        stamps = {}
        for path in walk_files(self.folder):
            name = path.relative_to(self.folder)
            if path.is_file() and not any(part.startswith(".") or self._is_left_out(part) for part in name.parts):
                stat = path.stat()
                stamps[name.as_posix()] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        return stamps
