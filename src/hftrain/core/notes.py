"""Notes at the end of a traceback: the origin of an error and the values involved."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from hftrain.core.log import get_logger

_MAX_SHOWN = 12


def add_note(error: BaseException, text: str) -> None:
    """Add a line to the end of an error's traceback, once; on Python 3.10, which shows no notes, it is logged.

    Example:
        >>> error = ValueError("no")
        >>> add_note(error, "Sample 3 of Data."), error.__notes__
        (None, ['Sample 3 of Data.'])
    """
    notes = getattr(error, "__notes__", [])
    if text not in notes:
        error.__notes__ = [*notes, text]  # type: ignore[attr-defined]
        if sys.version_info < (3, 11):
            get_logger(__name__).error("%s: %s", type(error).__name__, text)


def keep_facts(error: BaseException, **facts: Any) -> None:
    """Keep with an error what is known where it passes, for its message; the innermost place wins.

    Example:
        >>> error = ValueError("no")
        >>> keep_facts(error, batch=[1]), keep_facts(error, batch=[2], loss=0), facts_of(error)
        (None, None, {'batch': [1], 'loss': 0})
    """
    vars(error)["hftrain_facts"] = {**facts, **facts_of(error)}


def facts_of(error: BaseException) -> dict[str, Any]:
    """Return what `keep_facts` has kept with an error."""
    return dict(vars(error).get("hftrain_facts", {}))


def describe(value: Any) -> str:
    """Describe a batch, a sample or a part of one: names, dtypes and shapes, but no values.

    Example:
        >>> describe({"x": torch.zeros(2, 3), "text": ["a", "b"]})
        'x float32 (2, 3), text list of 2 str'
    """
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        parts = [f"{name} {describe(part)}" for name, part in list(value.items())[:_MAX_SHOWN]]
        return ", ".join(parts) + (", ..." if len(value) > _MAX_SHOWN else "") or "empty"
    if isinstance(value, (list, tuple)):
        if any(isinstance(part, (torch.Tensor, numpy.ndarray)) for part in value):
            return f"{type(value).__name__} of ({', '.join(map(describe, value[:_MAX_SHOWN]))})"
        kinds = {type(part).__name__ for part in value[:_MAX_SHOWN]}
        return f"{type(value).__name__} of {len(value)}{f' {kinds.pop()}' if len(kinds) == 1 else ''}"
    return "None" if value is None else type(value).__name__
