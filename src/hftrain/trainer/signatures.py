"""Older forms of the documented hooks keep working: signatures are looked at once, at construction."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Tell whether a function takes an argument of that name (or any keyword)."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def taking(function: Callable[..., Any], num_positional: int, name: str) -> Callable[..., Any]:
    """Return a function that takes `name` as its last positional argument, dropping it where `function` does not.

    Args:
        function: A hook, possibly overridden with an older signature.
        num_positional: How many positional arguments come before.
        name: The argument that newer signatures have.
    """
    if accepts(function, name):
        return function

    def without(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(name, None)
        return function(*args[:num_positional], **kwargs)

    return without
