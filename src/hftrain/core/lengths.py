"""Lengths and intervals written with their unit: "10ep", "500ba", "1e9tok", "0.1dur", "2h"."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_NUMBER = r"(\d+(?:\.\d+)?(?:e\d+)?)\s*"
_SECONDS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0}
_TIME = re.compile(rf"{_NUMBER}(d|h|min|s)\s*")
_OTHER = re.compile(rf"{_NUMBER}(ep|ba|tok|dur)")


class Length(NamedTuple):
    """A length above 0, in passes ("ep"), updates ("ba"), tokens ("tok"), shares of a run ("dur") or seconds ("s")."""

    value: float
    unit: str
    text: str


def read_length(given: Any) -> Length | None:
    """Return the length that a text says, None for anything else. Times are added up.

    Example:
        >>> read_length("1e9tok").value, read_length("1h 30min").value, read_length(500)
        (1000000000.0, 5400.0, None)
    """
    text = given.strip().lower() if isinstance(given, str) else ""
    if match := _OTHER.fullmatch(text):
        value, unit = float(match[1]), match[2]
    else:
        value, unit = sum(float(value) * _SECONDS[unit] for value, unit in _TIME.findall(text)), "s"
        value = 0.0 if _TIME.sub("", text) else value
    return Length(value, unit, given) if value > 0 else None
