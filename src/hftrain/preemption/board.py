"""Messages between processes without a collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Board:
    """A key-value board that any process may write and read at any time and from any thread.

    A collective needs all processes at the same call, which a signal handler or background writer cannot ensure.

    Args:
        store: The processes' shared store; None for a single process.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._notes: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        """Write a note; replaces an earlier one with the same key."""
        if self._store is None:
            self._notes[key] = text
        else:
            self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """Return a note, or None if it has not been written; does not wait."""
        if self._store is None:
            return self._notes.get(key)
        return self._store.get(key).decode() if self._store.check([key]) else None
