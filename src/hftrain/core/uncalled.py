"""Methods that a user defines and nothing would ever call."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

# Classes of these packages are no user's.
_OTHERS = frozenset({"builtins", "hftrain", "torch", "transformers", "typing"})
# How alike a name must be to one of ours to count as a misspelling of it.
_ALIKE = 0.88


def find_uncalled(kind: type, *, called: Iterable[str], known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the methods of a user's class that nothing would call, each with what to do instead.

    A method that another method of the class uses is a helper and may have any name.

    Args:
        kind: The class; bases from other packages are not looked at.
        called: The names that are called.
        known: Names that other libraries call, or that are often written for one that is called, with the remedy.
    """
    called = set(called)
    owners = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in _OTHERS]
    used = {name for owner in owners for name in _names_used(owner)}
    for owner in owners:
        ours = [value for name, value in vars(owner).items() if name in called]
        for name, value in vars(owner).items():
            is_method = isinstance(value, (FunctionType, staticmethod, classmethod))
            if not is_method or name in called or name in used or any(value is each for each in ours):
                continue
            if name in known:
                yield name, known[name]
            elif "_" in name.strip("_") and (near := difflib.get_close_matches(name, called, n=1, cutoff=_ALIKE)):
                yield name, f"Did you mean {near[0]!r}?"


def _names_used(owner: type) -> Iterator[str]:
    """Yield the attributes that a class's functions use, each but in the function of the same name."""
    for name, value in vars(owner).items():
        parts: list[Any] = [getattr(value, part, None) for part in ("fget", "fset", "__func__")]
        for function in (value, *parts):
            if isinstance(function, FunctionType):
                yield from (used for used in _names_in(function.__code__) if used != name)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
