"""What a command answers: lines for people, and the same as data for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


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
