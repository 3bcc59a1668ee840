"""What an error's report tells: the user's line that runs or raised it, where it came from, and the values involved."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import numpy
import torch
import torch.distributed as dist

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


_WAITING = (os.path.dirname(dist.__file__), torch.autograd.graph.__file__)
_OURS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
_PYTHON = os.path.dirname(os.__file__)


def waits_for_others(thread: int) -> bool:
    """Return whether a thread may be waiting for other processes: in torch.distributed or in a backward pass.

    A thread that runs the user's own code within a backward pass does not count as waiting.
    """
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code.co_filename.startswith(_WAITING)


def user_line(thread: int) -> str:
    """Return the innermost line of user code that a thread is executing, or of any code if none is the user's.

    Example:
        >>> import threading
        >>> user_line(threading.get_ident()).startswith("<module> (")
        True
    """
    top = frame = sys._current_frames().get(thread)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or top
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else "an unknown place"


def raising_line(error: BaseException, *, only_above: bool = False) -> str | None:
    """Return the innermost line of user code in an error's traceback; None if it has none.

    Args:
        only_above: Return None if the traceback ends with that line, which Python then prints last.

    Example:
        >>> try:
        ...     1 / 0
        ... except ZeroDivisionError as error:
        ...     raising_line(error).partition(":")[0]
        '<doctest hftrain.core.notes.raising_line[0]>'
    """
    lines = traceback.extract_tb(error.__traceback__)
    user_lines = [each for each in lines if not (_is_library(each.filename) or "site-packages" in each.filename)]
    if not user_lines or (only_above and user_lines[-1] is lines[-1]):
        return None
    last = user_lines[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}: {last.line}".removesuffix(": ")


def _is_library(path: str) -> bool:
    """Return whether a file belongs to torch, hftrain or Python; installed packages count as the user's."""
    return path.startswith((*_OURS, "<frozen")) or (path.startswith(_PYTHON) and "site-packages" not in path)
