"""What a command answers: lines for people, and the same as data for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells, the head first, as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


class Answer(list[str]):
    """The lines that a command prints.

    Args:
        lines: Without line ends.
        data: What ``--json`` prints instead: plain values.
        status: The exit status of the command.
    """

    def __init__(self, lines: Iterable[str], data: Any, status: int = 0) -> None:
        super().__init__(lines)
        self.data, self.status = data, status

    def to_json(self) -> str:
        """Return the data as JSON; NaN and infinite numbers, which JSON does not have, become null."""
        return json.dumps(json.loads(json.dumps(self.data, default=str), parse_constant=lambda _: None), indent=2)
