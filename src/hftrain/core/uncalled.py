"""Warnings about methods of users' classes that nothing calls, such as the hooks of other libraries."""

from __future__ import annotations

from collections.abc import Mapping

from hftrain.core.errors import explain
from hftrain.core.log import warn_once

# Classes of these packages are not the user's.
_OTHERS = frozenset({"builtins", "hftrain", "torch", "transformers", "typing"})


def warn_of_uncalled(kind: type, hooks: Mapping[str, str]) -> None:
    """Warn if a user's class defines a method under a known name that nothing here calls.

    Aliases of other methods are left out, and so are the names that the class lists in `not_hooks`.

    Args:
        kind: The class; bases from other packages are ignored.
        hooks: The names: hooks that other libraries call and usual misspellings, with what to do instead.
    """
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] in _OTHERS:
            continue
        for name in [name for name in vars(owner) if name in hooks]:
            value = vars(owner)[name]
            is_alias = any(other is value for key, other in vars(owner).items() if key not in hooks)
            if callable(value) and not is_alias and not is_meant(kind, name):
                warn_once(word_uncalled(kind, name, hooks[name]))


def is_meant(kind: type, name: str) -> bool:
    """Return whether a class or one of its bases lists a name in `not_hooks`."""
    return any(name in vars(owner).get("not_hooks", ()) for owner in kind.__mro__)


def word_uncalled(kind: type, name: str, remedy: str) -> str:
    """Compose the message that nothing calls a method, with what to do instead and what to do for a helper."""
    meant = f"If other code calls it, set not_hooks = ({name!r},) in the class."
    return explain(f"{kind.__name__} defines {name}:", "nothing calls it, so it would do nothing.", f"{remedy} {meant}")
