"""Notes that processes leave for each other without meeting: what no collective can carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Board:
    """A place where any process may leave a note and any may look, at any time and from any thread.

    A collective needs all processes at the same place; a signal, or a writer in the background, has none.

    Args:
        store: What the processes share; None for a process that is alone.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._own: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        """Leave a note, in place of one with the same key."""
        if self._store is None:
            self._own[key] = text
        else:
            self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """Return a note without waiting, or None if nobody has left it yet."""
        if self._store is None:
            return self._own.get(key)
        return self._store.get(key).decode() if self._store.check([key]) else None
