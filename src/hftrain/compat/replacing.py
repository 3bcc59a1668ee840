"""`install` and `uninstall`."""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from hftrain.compat.accelerate_patches import adapted_init, adapted_log, adapted_settings
from hftrain.compat.names import TELLTALE_CLASSES, replacements, watched_modules
from hftrain.core.elsewhere import forget_modules, watch_modules
from hftrain.core.errors import ConfigError
from hftrain.core.extras import require

# Packages that may refer to transformers' objects.
_LIBRARY = ("transformers", "hftrain")

# Restores what was replaced; None before `install`.
_undo: ExitStack | None = None


def install() -> None:
    """Replace transformers' Trainer, arguments, callbacks and outputs with hftrain's.

    Call it before you import the library that should train with hftrain: ``from transformers import Trainer`` and
    ``class MyTrainer(transformers.Trainer)`` then use hftrain's. Names without an object in hftrain are unchanged. A
    second call does nothing.

    A library may assign other default callbacks and trackers in transformers' modules: hftrain's Trainer reads them
    there, and warns of other functions and classes that a library has replaced in the training modules.

    Example:
        >>> import hftrain.compat
        >>> hftrain.compat.install()  # doctest: +SKIP
        >>> from trl import SFTConfig, SFTTrainer  # doctest: +SKIP
    """
    global _undo
    if _undo is not None:
        return
    require("transformers", feature="hftrain.compat", extra="transformers")
    from accelerate.logging import MultiProcessAdapter
    from accelerate.state import AcceleratorState, PartialState

    # Importing its modules may create the package's facade again, and other modules may still refer to the first one.
    facades = [importlib.import_module("transformers")]
    replaced = [pair for pair in replacements() if pair[1] is not pair[2]]
    facades = list({id(facade): facade for facade in (*facades, sys.modules["transformers"])}.values())
    _refuse_early_imports({id(theirs) for name, theirs, _ in replaced if name in TELLTALE_CLASSES})
    undo = ExitStack()
    # Runs last: modules of transformers that were imported since have hftrain's objects.
    undo.callback(_replace_objects, facades, {id(ours): theirs for _, theirs, ours in replaced})
    _replace_objects(facades, {id(theirs): ours for _, theirs, ours in replaced})
    for facade in facades:
        # Names that a facade has not looked up yet are missing from its attributes, but listed by `dir`.
        names = frozenset(dir(facade)) - vars(facade).keys()
        for name, ours in [(name, ours) for name, _, ours in replaced if name in names]:
            setattr(facade, name, ours)
            undo.callback(vars(facade).pop, name, None)
    for owner, name, adapt in (
        (MultiProcessAdapter, "log", adapted_log),
        (PartialState, "__init__", adapted_init),
        (AcceleratorState, "__init__", adapted_settings),
    ):
        original = getattr(owner, name)
        undo.callback(setattr, owner, name, original)
        setattr(owner, name, adapt(original))
    undo.callback(forget_modules)
    watch_modules(watched_modules())
    _undo = undo


def uninstall() -> None:
    """Restore transformers' objects in every module of transformers.

    Libraries imported since `install` keep hftrain's objects. Without `install`, it does nothing.
    """
    global _undo
    if _undo is not None:
        _undo.close()
        _undo = None


def _replace_objects(facades: list[ModuleType], objects: dict[int, Any]) -> None:
    """Replace objects, by identity, in all modules of transformers, and in their lists and dictionaries."""
    for module, name, value in _references(facades):
        if id(value) in objects:
            setattr(module, name, objects[id(value)])
        elif type(value) in (list, dict):
            for key, element in list(value.items() if isinstance(value, dict) else enumerate(value)):
                value[key] = objects.get(id(element), element)


def _references(facades: list[ModuleType]) -> list[tuple[ModuleType, str, Any]]:
    modules = [*facades, *(module for module in _modules() if _package(module) == "transformers")]
    unique = {id(module): module for module in modules}.values()
    return [(module, name, value) for module in unique for name, value in vars(module).items()]


def _refuse_early_imports(ids: set[int]) -> None:
    """Raise if a module outside transformers refers to the objects, or to classes derived from them."""
    holders = {
        module.__name__: names
        for module in _modules()
        if _package(module) not in _LIBRARY
        and (names := [name for name, value in list(vars(module).items()) if _is_one_of(value, ids)])
    }
    if holders:
        module_name, names = next(iter(holders.items()))
        objects = f"transformers' ({', '.join(sorted(names))})"
        others = f" So do {len(holders) - 1} more modules." if len(holders) > 1 else ""
        raise ConfigError(
            "Cannot put hftrain's objects in place of transformers':",
            f"the module {module_name!r} was imported before and holds {objects}.{others}",
            "Call hftrain.compat.install() at the start of the program, before such imports.",
        )


def _is_one_of(value: Any, ids: set[int]) -> bool:
    # `isinstance` reads the value's `__class__`, for which lazy objects in modules may emit a warning.
    is_class = issubclass(type(value), type)
    return id(value) in ids or (is_class and any(id(base) in ids for base in value.__mro__))


def _modules() -> list[ModuleType]:
    """Return the imported modules once each; `sys.modules` may contain other objects and duplicates."""
    return list({id(module): module for module in sys.modules.values() if isinstance(module, ModuleType)}.values())


def _package(module: ModuleType) -> str:
    return str(vars(module).get("__name__", "")).split(".")[0]
