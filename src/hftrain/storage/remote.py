"""One folder of a remote store, through fsspec: ``s3://``, ``gs://``, ``memory://`` and every other it knows."""

from __future__ import annotations

import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from hftrain.core.errors import ConfigError, MissingDependencyError
from hftrain.core.log import get_logger

T = TypeVar("T")

_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]+)://(?P<path>.+)", re.IGNORECASE)
# fsspec chains such as simplecache::s3://..., and what pathlib makes of a URL.
_SPOILT = re.compile(r"[a-z][a-z0-9+.-]+(::.*|:/[^/].*)", re.IGNORECASE)
# Seconds between attempts, besides what the store's own package retries.
_WAITS_S = (0.5, 1.0, 2.0, 4.0)
_FINAL = (FileNotFoundError, PermissionError, NotImplementedError, ValueError, TypeError)

logger = get_logger(__name__)


def is_url(folder: str | Path) -> bool:
    """Tell whether a folder is remote; a ``file://`` URL is a local path.

    Example:
        >>> is_url("s3://bucket/run"), is_url("runs/a"), is_url("file:///runs/a")
        (True, False, False)
    """
    match = _URL.fullmatch(str(folder))
    return match is not None and match["protocol"].lower() != "file"


def check_url(folder: str | Path) -> None:
    """Raise unless a folder is a path, or a URL whose store can be reached with what is installed; asks no network."""
    text = str(folder)
    asked = f"The folder {text!r} was given."
    if _SPOILT.fullmatch(text):
        raise ConfigError(asked, "It is neither a path nor a plain URL.", "Give text such as 's3://bucket/run'.")
    if not is_url(text):
        return
    from fsspec.registry import get_filesystem_class, known_implementations

    protocol = text.partition("://")[0].lower()
    try:
        get_filesystem_class(protocol)
    except ValueError as error:
        raise ConfigError(asked, f"fsspec knows no store {protocol!r}.", "Use a protocol that it lists.") from error
    except ImportError as error:
        package = str(known_implementations.get(protocol, {}).get("class", "")).partition(".")[0]
        # Some stores of fsspec itself, and those of other packages, need what only their own message names.
        remedy = f"Run: pip install {package}." if package not in ("", "fsspec") else "Install what the message names."
        raise MissingDependencyError(asked, f"{str(error).rstrip('.')}.", remedy) from error


class RemoteFolder:
    """Read and write the files of one remote folder; names are relative to it, with slashes.

    What fails is tried again, five times in all, unless trying again cannot help. Every method raises `OSError` when it
    has failed for good: `FileNotFoundError` where there is no such file, another one where the store cannot be used.

    Args:
        url: The folder's. It need not exist.
    """

    def __init__(self, url: str) -> None:
        check_url(url)
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        # The one store that does not make folders by itself.
        options = {"auto_mkdir": True} if self.url.startswith("local:") else {}
        self._fs, self._root = url_to_fs(self.url, **options)
        self._root = self._root.rstrip("/")

    def check_writable(self) -> None:
        """Prove that a file can be written here and deleted again."""
        # Always of the same name, so that a kill here leaves nothing that stays.
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
        """List what lies directly in the folder, sorted; nothing if it does not exist."""
        try:
            return sorted({Path(entry["name"].rstrip("/")).name for entry in self._ask("ls", "", detail=True)})
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        """Map the files below a folder, by their names in it, to their sizes in bytes; empty if there is none."""
        root = self._path(folder) + "/"
        try:
            found = self._ask("find", folder, detail=True)
        except FileNotFoundError:
            return {}
        return {path.partition(root)[2]: int(entry["size"] or 0) for path, entry in found.items() if root in path}

    def upload(self, path: Path, name: str) -> None:
        """Write a local file's bytes to the store; it is there whole when this returns."""
        self._do("put_file", str(path), self._path(name), name)

    def write(self, name: str, text: str) -> None:
        """Write a small file."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text"
            path.write_text(text, encoding="utf-8")
            self.upload(path, name)

    def download(self, name: str, path: Path) -> None:
        """Write a file's bytes to a local one, whose folder is made if absent."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._do("get_file", self._path(name), str(path), name)

    def delete_file(self, name: str) -> None:
        """Delete a file; one that is absent is none to delete."""
        with suppress(FileNotFoundError):
            self._ask("rm_file", name)

    def delete_folder(self, name: str) -> None:
        """Delete a folder and all that is in it; one that is absent is none to delete."""
        with suppress(FileNotFoundError):
            self._ask("rm", name, recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _ask(self, method: str, name: str, **options: Any) -> Any:
        def ask() -> Any:
            # Others write here too, and some stores remember what a folder held.
            self._fs.invalidate_cache()
            return getattr(self._fs, method)(self._path(name), **options)

        return self._retried(f"{method} {name}", ask)

    def _do(self, method: str, source: str, target: str, name: str) -> None:
        self._retried(f"{method} {name}", lambda: getattr(self._fs, method)(source, target))

    def _retried(self, what: str, call: Callable[[], T]) -> T:
        for wait_s in (*_WAITS_S, None):
            try:
                with _same_random_numbers():
                    return call()
            except _FINAL as error:
                if isinstance(error, OSError):
                    raise
                raise OSError(f"{what}: {type(error).__name__}: {error}") from error
            except Exception as error:
                if wait_s is None:
                    raise OSError(f"{what}: {type(error).__name__}: {error}") from error
                logger.warning("%s: %s failed, and is tried again: %r", self.url, what, error)
                # Spread, for many processes may have met the same failure.
                time.sleep(wait_s * random.SystemRandom().uniform(0.5, 1.5))
        raise AssertionError


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Leave Python's generator as it is: stores' packages draw the waits between their attempts from it.

    A training would go on with other numbers after a bad minute of the network. In a background thread the generator is
    the training's at the same time, and cannot be put back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
