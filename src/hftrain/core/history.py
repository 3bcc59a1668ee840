"""A log history as JSON text; each save converts only the new entries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from marshal import dumps
from typing import Any

_CHUNK = 1000
_SEPARATOR = ",\n    "
_PLAIN = frozenset({str, int, float, bool, type(None)})
# The separators that json.dumps(..., indent=2) writes within an entry; indent itself would take twice as long.
_encode = json.JSONEncoder(sort_keys=True, separators=(",\n      ", ": ")).encode
_BEFORE, _AFTER = '{\n  "": [\n    ', "\n  ]\n}"


@dataclass(slots=True)
class _Chunk:
    """Consecutive entries: their number and hash, their text, and copies of those not in the text yet."""

    size: int = 0
    mark: int | None = None
    text: str = ""
    waiting: list[Any] = field(default_factory=list)


class HistoryText:
    """The entries of a growing log history as `TrainerState.to_json` writes them.

    The text of an entry is made once. A user may change, remove or replace any entry: a chunk of entries is compared
    by a hash of its `marshal` bytes, which takes a tenth of the time of making its text.
    """

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []

    def take(self, history: Sequence[Any]) -> None:
        """Capture the entries as they are now; their text can be made later, in another thread."""
        known, self._chunks = self._chunks, []
        for index, start in enumerate(range(0, len(history), _CHUNK)):
            entries = history[start : start + _CHUNK]
            chunk = known[index] if index < len(known) else _Chunk()
            if chunk.mark is None or chunk.mark != _mark(entries[: chunk.size]):
                chunk = _Chunk()
            if chunk.size < len(entries):
                chunk.waiting += [dict(each) if isinstance(each, Mapping) else each for each in entries[chunk.size :]]
                chunk.size, chunk.mark = len(entries), _mark(entries)
            self._chunks.append(chunk)

    def parts(self) -> list[str]:
        """Return the text of the captured entries in pieces: what belongs between the brackets of the list.

        Raises:
            TypeError, ValueError: An entry is not plain data.
        """
        for chunk in self._chunks:
            if chunk.waiting:
                texts = [_text(entry) for entry in chunk.waiting]
                chunk.text = _SEPARATOR.join([chunk.text, *texts] if chunk.text else texts)
                chunk.waiting = []
        return [part for chunk in self._chunks for part in (_SEPARATOR, chunk.text)][1:]


def _mark(entries: Sequence[Any]) -> int | None:
    """Return a hash of entries that changes with any of them; None if they hold more than plain data."""
    try:
        return hash(dumps(list(entries), 2))  # later formats write equal data in different ways
    except ValueError:
        return None


def _text(entry: Any) -> str:
    """Return the text of an entry, as ``json.dumps(..., indent=2, sort_keys=True)`` writes it."""
    if type(entry) is dict and entry and _PLAIN.issuperset(map(type, entry.values())):
        return "{\n      " + _encode(entry)[1:-1] + "\n    }"
    return json.dumps({"": [entry]}, indent=2, sort_keys=True)[len(_BEFORE) : -len(_AFTER)]
