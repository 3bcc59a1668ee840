"""Public names of a package that are imported on first access."""

from __future__ import annotations

import ast
import gc
import importlib
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hftrain.core.elsewhere import names_elsewhere
from hftrain.core.errors import suggest


def lazy_names(package: str, *own: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package whose names are defined in other modules.

    Its ``__init__.pyi``, which type checkers read instead of ``__init__.py``, is the only list of the names.

    Args:
        own: Public names that the package defines itself.

    Example:
        >>> get, _, names = lazy_names("hftrain")
        >>> "TaskModule" in names, get("TaskModule").__module__
        (True, 'hftrain.task.module')
    """
    stub = ast.parse(pkgutil.get_data(package, "__init__.pyi") or b"")
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    home_of = {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname}
    public = {*home_of, *own}

    def get(name: str) -> Any:
        if home_of.get(name) == package:
            return importlib.import_module(f"{package}.{name}")
        if name in home_of:
            value = getattr(_imported(home_of[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        lightnings = names_elsewhere("lightning_names").get(name, "")
        lightnings = lightnings and f"It is one of Lightning's names. {lightnings}"
        remedy = names_elsewhere("transformers_names").get(name, lightnings)
        hint = remedy or suggest(name, public)
        message = f"module {package!r} has no attribute {name!r}."
        message = f"{message} {hint}" if remedy or (hint.startswith("Did") and not name.startswith("__")) else message
        if remedy and sys._getframe(1).f_code.co_name == "_handle_fromlist":
            # `from package import name` asks from here, and replaces the message of an AttributeError by its own.
            raise ImportError(message, name=package)
        raise AttributeError(message, name=name, obj=sys.modules[package])

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return get, list_names, sorted(public)


def _imported(module: str) -> ModuleType:
    """Import a module with garbage collection off: a pass over torch's objects takes as long as our own imports."""
    if not gc.isenabled():
        return importlib.import_module(module)
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.enable()
