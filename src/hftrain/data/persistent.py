"""Loaders whose workers outlive one pass."""

from __future__ import annotations

from collections import OrderedDict
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
        self._kept: OrderedDict[tuple[int, ...], tuple[tuple[Any, ...], Any]] = OrderedDict()

    def get(self, parts: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return the loader that was made of these very objects, which are kept alive, or make it."""
        key = tuple(map(id, parts))
        if key not in self._kept:
            # Forgotten first, so that its workers end before others start.
            while len(self._kept) >= max(self.limit, 1):
                self._kept.popitem(last=False)
            self._kept[key] = parts, make()
        self._kept.move_to_end(key)
        return self._kept[key][1]

    def clear(self) -> None:
        """Forget all loaders."""
        self._kept.clear()


def end_workers(loader: Any) -> None:
    """End the workers of a torch loader that persist, however long the loader itself may be referred to."""
    loader = getattr(loader, "loader", loader)
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None
