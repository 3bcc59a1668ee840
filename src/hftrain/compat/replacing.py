"""`install` and `uninstall`."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, NamedTuple

from hftrain.compat.accelerate_patches import adapted_init, adapted_log, adapted_settings
from hftrain.compat.names import TELLING, replacements
from hftrain.core.errors import ConfigError
from hftrain.core.optional import require

# Packages that may refer to transformers' objects.
_LIBRARY = ("transformers", "hftrain")

_MISSING = object()


class _Installed(NamedTuple):
    """What was replaced: each name with both objects, and the previous value of each module's attribute."""

    pairs: list[tuple[str, Any, Any]]
    before: list[tuple[ModuleType, str, Any]]
    facades: list[ModuleType]
    log: Any
    init: Any
    settings: Any


_installed: _Installed | None = None


def install() -> None:
    """Replace transformers' Trainer, arguments, callbacks and outputs with hftrain's.

    Call it before you import the library that should train with hftrain: ``from transformers import Trainer`` and
    ``class MyTrainer(transformers.Trainer)`` then use hftrain's. Names without an object in hftrain are unchanged. A
    second call does nothing.

    Example:
        >>> import hftrain.compat
        >>> hftrain.compat.install()  # doctest: +SKIP
        >>> from trl import SFTConfig, SFTTrainer  # doctest: +SKIP
    """
    global _installed
    if _installed is not None:
        return
    require("transformers", feature="hftrain.compat", extra="transformers")
    from accelerate.logging import MultiProcessAdapter
    from accelerate.state import AcceleratorState, PartialState

    # Importing its modules may create the package's facade again, and other modules may still refer to the first one.
    facades = [importlib.import_module("transformers")]
    pairs = [pair for pair in replacements() if pair[1] is not pair[2]]
    facades = list({id(facade): facade for facade in (*facades, sys.modules["transformers"])}.values())
    _refuse_holders({id(theirs) for name, theirs, _ in pairs if name in TELLING})
    ours_of = {id(theirs): ours for _, theirs, ours in pairs}
    before = [(module, name, value) for module, name, value in _held(facades) if id(value) in ours_of]
    # Names that a facade has not looked up yet are missing from its attributes, but listed by `dir`.
    before += [
        (facade, name, _MISSING)
        for facade, known in [(facade, frozenset(dir(facade))) for facade in facades]
        for name, _, _ in pairs
        if name in known and name not in vars(facade)
    ]
    by_name = {name: ours for name, _, ours in pairs}
    for module, name, value in before:
        setattr(module, name, by_name[name] if value is _MISSING else ours_of[id(value)])
    originals = MultiProcessAdapter.log, PartialState.__init__, AcceleratorState.__init__
    _installed = _Installed(pairs, before, facades, *originals)
    MultiProcessAdapter.log = adapted_log(MultiProcessAdapter.log)
    PartialState.__init__ = adapted_init(PartialState.__init__)
    AcceleratorState.__init__ = adapted_settings(AcceleratorState.__init__)


def uninstall() -> None:
    """Restore transformers' objects in every module of transformers.

    Libraries imported since `install` keep hftrain's objects. Without `install`, it does nothing.
    """
    global _installed
    if _installed is None:
        return
    from accelerate.logging import MultiProcessAdapter
    from accelerate.state import AcceleratorState, PartialState

    MultiProcessAdapter.log, PartialState.__init__ = _installed.log, _installed.init
    AcceleratorState.__init__ = _installed.settings
    for module, name, value in _installed.before:
        if value is _MISSING:
            vars(module).pop(name, None)
        else:
            setattr(module, name, value)
    # Modules of transformers that were imported since `install` have hftrain's objects.
    theirs_of = {id(ours): theirs for _, theirs, ours in _installed.pairs}
    for module, name, value in _held(_installed.facades):
        if id(value) in theirs_of:
            setattr(module, name, theirs_of[id(value)])
    _installed = None


def _held(facades: list[ModuleType]) -> list[tuple[ModuleType, str, Any]]:
    """Return the (module, name, object) of all attributes of transformers' modules."""
    modules = [*facades, *(module for module in _modules() if _package(module) == "transformers")]
    unique = {id(module): module for module in modules}.values()
    return [(module, name, value) for module in unique for name, value in vars(module).items()]


def _refuse_holders(theirs: set[int]) -> None:
    """Raise if a module outside transformers refers to the objects, or to classes derived from them."""
    found = {
        module.__name__: names
        for module in _modules()
        if _package(module) not in _LIBRARY
        and (names := [name for name, value in list(vars(module).items()) if _is_one_of(value, theirs)])
    }
    if found:
        first, names = next(iter(found.items()))
        held = f"transformers' ({', '.join(sorted(names))})"
        others = f" So do {len(found) - 1} more modules." if len(found) > 1 else ""
        raise ConfigError(
            "Cannot put hftrain's objects in place of transformers':",
            f"the module {first!r} was imported before and holds {held}.{others}",
            "Call hftrain.compat.install() at the start of the program, before such imports.",
        )


def _is_one_of(value: Any, theirs: set[int]) -> bool:
    # `isinstance` reads the value's `__class__`, for which lazy objects in modules may emit a warning.
    is_class = issubclass(type(value), type)
    return id(value) in theirs or (is_class and any(id(base) in theirs for base in value.__mro__))


def _modules() -> list[ModuleType]:
    """Return the imported modules once each; `sys.modules` may contain other objects and duplicates."""
    return list({id(module): module for module in sys.modules.values() if isinstance(module, ModuleType)}.values())


def _package(module: ModuleType) -> str:
    return str(vars(module).get("__name__", "")).split(".")[0]
