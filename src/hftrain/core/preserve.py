"""Restore objects after use."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@contextmanager
def temporarily(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object, which it has, within the context."""
    old_values = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in old_values.items():
            setattr(owner, name, value)


@contextmanager
def preserved(*owners: Any) -> Iterator[None]:
    """Restore all attributes of objects at the end: containers of plain values by content, others by reference.

    The whole ``__dict__`` of each object is restored, so no attribute can be missed. Objects without one are left
    alone.
    """
    objects = [owner for owner in owners if hasattr(owner, "__dict__")]
    copies = [
        {name: copy.deepcopy(value) if _is_plain(value) else value for name, value in vars(owner).items()}
        for owner in objects
    ]
    try:
        yield
    finally:
        for owner, attributes in zip(objects, copies, strict=True):
            # Bypasses a __setattr__ that checks names.
            object.__setattr__(owner, "__dict__", attributes)


@contextmanager
def preserved_signals() -> Iterator[None]:
    """Restore the signal handlers that a library replaces; with its own, later training runs would get no signal."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} if is_main else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple, set)) else isinstance(value, _PLAIN)
