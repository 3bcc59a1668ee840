"""Detection of user-defined methods that nothing calls."""

from __future__ import annotations

import ast
import difflib
import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import FrameType, FunctionType

from hftrain.core.errors import HFTrainError, explain
from hftrain.core.log import warn_once

# Classes of these packages are not the user's.
_OTHERS = frozenset({"builtins", "hftrain", "torch", "transformers", "typing"})
# Minimum similarity of a name to one of our hooks to count as a misspelling of it.
_ALIKE = 0.88


def check_uncalled(
    kind: type,
    *,
    error: type[HFTrainError],
    called: Iterable[str] = (),
    hooks: Mapping[str, str] | None = None,
    misnomers: Mapping[str, str] | None = None,
) -> None:
    """Raise if a user's class defines another library's hook, and warn if it seems to misspell one of hftrain's.

    A method that the class, its file or a file on the call stack uses is a helper and may have any name; so may the
    methods that the class lists in `not_hooks`.

    Args:
        kind: The class; bases from other packages are ignored.
        called: The names of hooks that hftrain calls.
        hooks: Names that other libraries call, with what to do instead.
        misnomers: Common wrong names of hooks, with what to do instead.
    """
    called, hooks, misnomers = set(called), hooks or {}, misnomers or {}
    spellings = {_squeeze(name): name for name in called}
    for name, function in _own_methods(kind, called):
        if is_meant(kind, name):
            continue
        meant = spellings.get(_squeeze(name))
        remedy = hooks.get(name) or (f"Rename it to {meant}." if meant else None)
        hint = remedy or misnomers.get(name) or _near(name, called)
        if hint is None or _is_used(name, function):
            continue
        message = word_uncalled(kind, name, hint)
        if remedy is not None:
            raise error(message)
        warn_once(message)


def is_meant(kind: type, name: str) -> bool:
    """Return whether a class or one of its bases lists a name in `not_hooks`."""
    return any(name in vars(owner).get("not_hooks", ()) for owner in kind.__mro__)


def word_uncalled(kind: type, name: str, remedy: str) -> str:
    """Compose the message that nothing calls a method, with what to do instead and what to do for a helper."""
    meant = f"If other code calls it, set not_hooks = ({name!r},) in the class."
    return explain(f"{kind.__name__} defines {name}:", "nothing calls it, so it would do nothing.", f"{remedy} {meant}")


def _own_methods(kind: type, called: set[str]) -> Iterator[tuple[str, FunctionType]]:
    """Yield names and functions of the user's methods that are not called; aliases of called methods are left out."""
    for owner in kind.__mro__:
        if _package(owner.__module__) in _OTHERS:
            continue
        methods = {name: getattr(value, "__func__", value) for name, value in vars(owner).items()}
        ours = [value for name, value in methods.items() if name in called]
        for name, value in methods.items():
            if isinstance(value, FunctionType) and not any(value is each for each in ours):
                yield name, value


def _package(module: str) -> str:
    return module.partition(".")[0]


def _squeeze(name: str) -> str:
    return name.lower().replace("_", "")


def _near(name: str, called: set[str]) -> str | None:
    if "_" not in name.strip("_"):
        return None
    words = sorted(name.split("_"))
    near = [each for each in called if sorted(each.split("_")) == words]
    near = near or difflib.get_close_matches(name, called, n=1, cutoff=_ALIKE)
    return f"Did you mean {near[0]!r}?" if near else None


def _is_used(name: str, function: FunctionType) -> bool:
    """Return whether the file of a method, or one on the call stack, uses an attribute of that name."""
    files = {function.__code__.co_filename}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _package(frame.f_globals.get("__name__", "")) not in _OTHERS:
            files.add(frame.f_code.co_filename)
        frame = frame.f_back
    for file in files:
        source = "".join(linecache.getlines(file))
        with suppress(SyntaxError):
            if name in source and _uses(ast.parse(source), name):
                return True
    return False


def _uses(node: ast.AST, name: str) -> bool:
    """Return whether code reads an attribute, by a dot or getattr, outside functions of the same name."""
    match node:
        case ast.FunctionDef(name=own) | ast.AsyncFunctionDef(name=own) if own == name:
            return False
        case ast.Attribute(attr=attr, ctx=ast.Load()) if attr == name:
            return True
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=attr), *_]) if attr == name:
            return True
    return any(_uses(child, name) for child in ast.iter_child_nodes(node))
