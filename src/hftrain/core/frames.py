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
    innermost = own = sys._current_frames().get(thread)
    while own is not None and _is_library(own.f_code.co_filename):
        own = own.f_back
    own = own or innermost
    return f"{own.f_code.co_name} ({own.f_code.co_filename}:{own.f_lineno})" if own else "an unknown place"


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
    own = [each for each in lines if not (_is_library(each.filename) or "site-packages" in each.filename)]
    if not own or (only_above and own[-1] is lines[-1]):
        return None
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}: {own[-1].line}".removesuffix(": ")


def _is_library(path: str) -> bool:
    """Return whether a file belongs to torch, hftrain or Python; installed packages count as the user's."""
    return path.startswith((*_OURS, "<frozen")) or (path.startswith(_PYTHON) and "site-packages" not in path)
