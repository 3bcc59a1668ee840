"""Public names of a package that are imported when they are first asked for."""

from __future__ import annotations

import importlib
import opcode
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hftrain.core.errors import suggest
from hftrain.core.lightning import LIGHTNING_NAMES
from hftrain.core.transformers_names import TRANSFORMERS_NAMES

_IMPORT_FROM = opcode.opmap["IMPORT_FROM"]


def lazy_names(
    package: str, homes: Mapping[str, Iterable[str]], *, subpackages: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package whose names live in other modules.

    Args:
        homes: Module to the names that are taken from it.
        subpackages: Packages inside it that are public names themselves.

    Example:
        >>> get, _ = lazy_names("hftrain.core", {"hftrain.core.errors": ["explain"]})
        >>> get("explain").__module__
        'hftrain.core.errors'
    """
    home_of = {name: module for module, names in homes.items() for name in names}
    public = {*home_of, *subpackages}

    def get(name: str) -> Any:
        if name in subpackages:
            return importlib.import_module(f"{package}.{name}")
        if name in home_of:
            value = getattr(importlib.import_module(home_of[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        message = _missing(package, name, public)
        # `from package import name` would replace the message of an AttributeError by a sentence of its own.
        frame = sys._getframe(1)
        is_from = frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM
        raise (
            ImportError(message, name=package)
            if is_from
            else AttributeError(message, name=name, obj=sys.modules[package])
        )

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return get, list_names


def _missing(package: str, name: str, public: set[str]) -> str:
    message = f"module {package!r} has no attribute {name!r}."
    if name in LIGHTNING_NAMES:
        return f"{message} It is one of Lightning's names. {LIGHTNING_NAMES[name]}"
    if name in TRANSFORMERS_NAMES:
        return f"{message} {TRANSFORMERS_NAMES[name]}"
    hint = suggest(name, public)
    return f"{message} {hint}" if hint.startswith("Did") and not name.startswith("__") else message
