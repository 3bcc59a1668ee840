"""Loaders whose workers outlive one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LoaderCache:
    """Keep the loaders made last, so that workers that persist serve the next pass over the same data.

    A loader that is forgotten takes its workers with it, unless somebody else still holds it.

    Args:
        limit: How many to keep; the one unused for longest goes first.

    Example:
        >>> cache, data = LoaderCache(limit=1), [1, 2]
        >>> first = cache.get((data,), lambda: iter(data))
        >>> cache.get((data,), lambda: None) is first, cache.get(([1, 2],), lambda: None) is first
        (True, False)
    """

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self._kept: list[tuple[tuple[Any, ...], Any]] = []

    def get(self, parts: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return the loader that was made of these very objects, or make it.

        Args:
            parts: What the loader depends on; compared by identity, so they are kept alive.
            make: Makes the loader.
        """
        found = next((entry for entry in self._kept if _are_same(entry[0], parts)), None)
        others = [entry for entry in self._kept if entry is not found]
        if found is None:
            # Forgotten first, so that its workers end before others start.
            self._kept = others = others[max(len(others) - self.limit + 1, 0) :]
            found = (parts, make())
        self._kept = [*others, found]
        return found[1]

    def clear(self) -> None:
        """Forget all loaders."""
        self._kept = []


def end_workers(loader: Any) -> None:
    """End the workers of a torch loader that persist, however long the loader itself may be referred to."""
    loader = getattr(loader, "loader", loader)
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None


def _are_same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
