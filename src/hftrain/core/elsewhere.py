"""Names of Lightning, transformers and memory, and what to do instead, for error messages and warnings."""

from __future__ import annotations

import functools
import json
import pkgutil
from collections.abc import Mapping
from typing import Any

from hftrain.core.errors import explain
from hftrain.core.log import warn_once

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
_BASES = ("LightningModule", "LightningDataModule", "Callback")
# Classes of these packages are not the user's.
_OTHERS = frozenset({"builtins", "hftrain", "torch", "transformers", "typing"})


@functools.cache
def names_elsewhere(table: str) -> dict[str, str]:
    """Return the names in a table of `elsewhere.json`, each with the answer to it.

    The tables: public names (`lightning_names`, `transformers_names`); names of settings (`settings`, `arguments`) and
    of the Trainer's keywords and attributes (`trainer_keywords`, `trainer_attributes`); private hooks of transformers'
    Trainer (`trainer_hooks`, with an empty answer where ours calls it, and `newer_trainer_hooks` since version 5);
    events under other names (`events`) and without an equivalent (`other_events`), and methods and attributes of
    callbacks and modules that nothing here calls or has.
    """
    tables = json.loads(pkgutil.get_data(__package__, "elsewhere.json") or b"")
    return {name: answer for answer, names in tables[table].items() for name in names.split()}


def lightning_base(thing: Any) -> str | None:
    """Return which of Lightning's classes an object, or a class, derives from; None if none."""
    kind = thing if isinstance(thing, type) else type(thing)
    names = [each.__name__ for each in kind.__mro__ if each.__module__.partition(".")[0] in _PACKAGES]
    return next((name for name in _BASES if name in names), None)


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
