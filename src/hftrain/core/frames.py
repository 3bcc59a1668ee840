"""The user's line that a thread is executing, or that raised an error."""

from __future__ import annotations

import os
import sys
import traceback

import torch
import torch.distributed as dist

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
        '<doctest hftrain.core.frames.raising_line[0]>'
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
