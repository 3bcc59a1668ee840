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
    kind: type,
    base: type,
    *,
    defined: Mapping[str, Any],
    given: Mapping[str, Any],
    attributes: Mapping[str, Any],
) -> None:
    """Raise if a subclass defines a hook that nothing calls, or a private name that the base class uses.

    Args:
        base: The class that calls the hooks; the package's own subclasses of it are not checked.
        defined: What the base class itself defines; whatever else it has, a library has assigned.
        given: The attributes that a subclass set before it called the base class's ``__init__``.
    """
    # A class that calls a newer hook itself has its own helper of that name, older than the hook of transformers.
    documented, newer = names_elsewhere("trainer_hooks"), names_elsewhere("newer_trainer_hooks")
    assigned = {name for name in (*documented, *newer) if getattr(base, name, None) is not defined.get(name)}
    is_ours = all(each.__module__.startswith("hftrain.") for each in kind.__mro__[:-1] if each not in base.__mro__)
    if is_ours and not assigned:
        return
    for name, remedy in {**documented, **{name: newer[name] for name in assigned & newer.keys()}}.items():
        if not hasattr(kind, name) or (name in defined and name not in HELPERS) or is_meant(kind, name):
            continue
        if name in assigned or _defines(kind, base, name):
            raise ConfigError(word_uncalled(kind, name, remedy or "Override one of the documented methods instead."))
    warn_of_uncalled(kind, {name: remedy for name, remedy in newer.items() if name not in defined})
    own = {name for each in base.__mro__ for name in vars(each) if _is_private(name) and name not in documented}
    taken = {name for name in own - _SETTABLE if _defines(kind, base, name)}
    for name, value in attributes.items():
        is_ours = _is_private(name) and name not in _SETTABLE and (name not in given or given[name] is not value)
        if is_ours and (name in given or hasattr(kind, name)):
            taken.add(name)
    if taken:
        raise ConfigError(
            f"{kind.__name__} defines {', '.join(sorted(taken))}.",
            "Trainer uses this name itself, and the two would conflict.",
            "Choose another name.",
        )


def missing_attribute(kind: type, name: str, *, is_made: bool) -> str:
    """Return the error message for a missing attribute, with a remedy if other Trainers have it.

    Args:
        is_made: Whether the Trainer's ``__init__`` has been called.
    """
    message = f"{kind.__name__!r} object has no attribute {name!r}"
    if not is_made:
        return f"{message}: its __init__ has not called that of Trainer. Call super().__init__(...) in it first."
    tables = map(names_elsewhere, ("trainer_hooks", "newer_trainer_hooks", "trainer_attributes"))
    remedy = next((table[name] for table in tables if table.get(name)), None)
    return f"{message}. {remedy}" if remedy else message


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defines(kind: type, base: type, name: str) -> bool:
    owner = next(each for each in kind.__mro__ if name in vars(each))
    return owner is not base and not owner.__module__.startswith("hftrain.")
