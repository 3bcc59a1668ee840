"""Loaders whose workers outlive one pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class LoaderCache:
    """Keep the latest loaders, so that persistent workers serve the next pass over the same data.

    The workers of a removed loader end, unless the loader is still referenced elsewhere.

    Args:
        limit: How many to keep; the least recently used one is removed first.

    Example:
        >>> cache, data = LoaderCache(limit=1), [1, 2]
        >>> first = cache.get((data,), lambda: iter(data))
        >>> cache.get((data,), lambda: None) is first, cache.get(([1, 2],), lambda: None) is first
        (True, False)
    """

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[tuple[int, ...], tuple[tuple[Any, ...], Any]] = OrderedDict()

    def get(self, parts: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return the loader of these objects (compared by identity, and kept alive), or create it."""
        key = tuple(map(id, parts))
        if key not in self._kept:
            # Removed first, so that its workers end before others start.
            while len(self._kept) >= max(self.limit, 1):
                self._kept.popitem(last=False)
            self._kept[key] = parts, make()
        self._kept.move_to_end(key)
        return self._kept[key][1]

    def clear(self) -> None:
        """Remove all loaders."""
        self._kept.clear()


def end_workers(loader: Any) -> None:
    """End the persistent workers of a torch loader, even if the loader is still referenced."""
    loader = getattr(loader, "loader", loader)
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None
