"""fsspec's store in memory, for tests of remote folders, and what may go wrong with one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hftrain.extras.remote import folders
from hftrain.storage.files import CACHE_VARIABLE

URL = "memory://bucket/run"


def listing(folder: str = "/bucket/run") -> list[str]:
    """Return the names of the files in the store, below a folder."""
    return sorted(name.removeprefix(f"{folder}/") for name in MemoryFileSystem.store if name.startswith(f"{folder}/"))


def read(name: str) -> bytes:
    """Return a file's bytes."""
    content: bytes = MemoryFileSystem.store[f"/bucket/run/{name}"].getvalue()
    return content


def write(name: str, content: bytes) -> None:
    """Replace a file's bytes."""
    MemoryFileSystem().pipe_file(f"/bucket/run/{name}", content)


@contextmanager
def empty_store(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[None]:
    """Begin with nothing in the store and mirrors in `cache`; nothing waits between attempts."""
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    monkeypatch.setattr(folders, "_WAITS_S", (0.0, 0.0, 0.0, 0.0))
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def failing(
    monkeypatch: pytest.MonkeyPatch, method: str, *, times: float, error: Exception, only: Callable[[str], bool] = bool
) -> list[str]:
    """Let a method of the store fail, before it does anything, for the paths that `only` picks; return the failures."""
    whole, failures = getattr(MemoryFileSystem, method), []

    def fail_at_first(self: MemoryFileSystem, *args: Any, **kwargs: Any) -> Any:
        path = next((str(a) for a in args if "bucket" in str(a)), "")
        if only(path) and len(failures) < times:
            failures.append(path)
            raise error
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, method, fail_at_first)
    return failures
