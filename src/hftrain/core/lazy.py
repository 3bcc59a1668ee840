"""Public names of a package that are imported on first access: its own, and those that transformers defines."""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hftrain.core.elsewhere import names_elsewhere
from hftrain.core.errors import MissingDependencyError, suggest

# Packages, and the modules of transformers that cannot be imported without them.
_NEEDED = {"transformers": "transformers.", "IPython": "transformers.utils.notebook"}


def lazy_names(package: str, *own: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package whose names are defined in other modules.

    Its ``__init__.pyi``, which type checkers read instead of ``__init__.py``, is the only list of the names. Those that
    it imports from transformers are listed where they can be imported, and say elsewhere what to install.

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
    reexports = {name for name, home in home_of.items() if home.startswith("transformers.")}
    unavailable = tuple(
        modules
        for module, modules in _NEEDED.items()
        # In `sys.modules`, None forbids an import.
        if reexports and not sys.modules.get(module, module not in sys.modules and importlib.util.find_spec(module))
    )
    public = {*own, *(name for name, home in home_of.items() if not home.startswith(unavailable))}

    def get(name: str) -> Any:
        if home_of.get(name) == package:
            return importlib.import_module(f"{package}.{name}")
        if name in home_of:
            home = home_of[name]
            value = from_transformers(home, name) if name in reexports else getattr(_imported(home), name)
            setattr(sys.modules[package], name, value)
            return value
        lightning_hint = names_elsewhere("lightning_names").get(name, "")
        lightning_hint = lightning_hint and f"It is one of Lightning's names. {lightning_hint}"
        remedy = names_elsewhere("transformers_names").get(name, lightning_hint)
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


def from_transformers(home: str, name: str) -> Any:
    """Return what a module of transformers defines; raise `MissingDependencyError` if it is not installed."""
    _imported("hftrain.core.extras").require("transformers", feature=f"hftrain.{name}", extra="transformers")
    try:
        return getattr(_imported(home), name)
    except (ImportError, AttributeError) as error:
        reason = f"{home} of the installed transformers does not have it: {error}."
        remedy = "Install another version: the extra 'transformers' of hftrain names those that work."
        raise MissingDependencyError(f"Cannot use hftrain.{name}:", reason, remedy) from error


def _imported(module: str) -> ModuleType:
    """Import a module with garbage collection off: a pass over torch's objects takes as long as our own imports."""
    if not gc.isenabled():
        return importlib.import_module(module)
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.enable()
