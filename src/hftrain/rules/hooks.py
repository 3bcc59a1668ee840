"""Check what a subclass defines: documented hooks that are never called, and names that the Trainer uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrain.core.elsewhere import is_meant, names_elsewhere, warn_of_uncalled, word_uncalled
from hftrain.core.errors import ConfigError

# Methods that a subclass may call, but that the Trainer does not call.
HELPERS = frozenset(
    {
        *("_gather_and_numpify", "_issue_warnings_after_load", "_load_scaler", "_move_model_to_device"),
        *("_save_rng_state", "_save_scaler", "_sorted_checkpoints"),
    }
)

# Private names that downstream classes set.
_SETTABLE = frozenset(
    {
        *("_created_lr_scheduler", "_eval_dataloaders", "_loggers_initialized", "_memory_tracker"),
        *("_pad_across_processes", "_past", "_signature_columns"),
    }
)


def check_hooks(
    cls: type,
    base: type,
    *,
    defined: Mapping[str, Any],
    initial: Mapping[str, Any],
    attributes: Mapping[str, Any],
) -> None:
    """Raise if a subclass defines a hook that nothing calls, or a private name that the base class uses.

    Args:
        base: The class that calls the hooks; the package's own subclasses of it are not checked.
        defined: What the base class itself defines; whatever else it has, a library has assigned.
        initial: The attributes that a subclass set before it called the base class's ``__init__``.
    """
    # A class that calls a newer hook itself has its own helper of that name, older than the hook of transformers.
    documented, newer = names_elsewhere("trainer_hooks"), names_elsewhere("newer_trainer_hooks")
    patches = {name for name in (*documented, *newer) if getattr(base, name, None) is not defined.get(name)}
    is_ours = all(each.__module__.startswith("hftrain.") for each in cls.__mro__[:-1] if each not in base.__mro__)
    if is_ours and not patches:
        return
    for name, remedy in {**documented, **{name: newer[name] for name in patches & newer.keys()}}.items():
        if not hasattr(cls, name) or (name in defined and name not in HELPERS) or is_meant(cls, name):
            continue
        if name in patches or _defines(cls, base, name):
            raise ConfigError(word_uncalled(cls, name, remedy or "Override one of the documented methods instead."))
    warn_of_uncalled(cls, {name: remedy for name, remedy in newer.items() if name not in defined})
    private = {name for each in base.__mro__ for name in vars(each) if _is_private(name) and name not in documented}
    conflicts = {name for name in private - _SETTABLE if _defines(cls, base, name)}
    for name, value in attributes.items():
        is_new = _is_private(name) and name not in _SETTABLE and (name not in initial or initial[name] is not value)
        if is_new and (name in initial or hasattr(cls, name)):
            conflicts.add(name)
    if conflicts:
        raise ConfigError(
            f"{cls.__name__} defines {', '.join(sorted(conflicts))}.",
            "Trainer uses this name itself, and the two would conflict.",
            "Choose another name.",
        )


def missing_attribute(cls: type, name: str, *, is_made: bool) -> str:
    """Return the error message for a missing attribute, with a remedy if other Trainers have it.

    Args:
        is_made: Whether the Trainer's ``__init__`` has been called.
    """
    message = f"{cls.__name__!r} object has no attribute {name!r}"
    if not is_made:
        return f"{message}: its __init__ has not called that of Trainer. Call super().__init__(...) in it first."
    tables = map(names_elsewhere, ("trainer_hooks", "newer_trainer_hooks", "trainer_attributes"))
    remedy = next((table[name] for table in tables if table.get(name)), None)
    return f"{message}. {remedy}" if remedy else message


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defines(cls: type, base: type, name: str) -> bool:
    owner = next(parent for parent in cls.__mro__ if name in vars(parent))
    return owner is not base and not owner.__module__.startswith("hftrain.")
