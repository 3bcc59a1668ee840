"""Checks as rows: a condition, what cannot be used, the reason, the remedy, and the received values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hftrain.core.errors import ConfigError

Row = tuple[Any, str, str, str] | tuple[Any, str, str, str, dict[str, Any]]


def refuse(rows: Iterable[Row]) -> None:
    """Raise for the first row whose condition holds."""
    for row in rows:
        if row[0]:
            raise ConfigError(row[1], row[2], row[3], **(row[4] if len(row) == 5 else {}))
