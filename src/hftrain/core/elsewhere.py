"""Names of Lightning, transformers and memory, and what to do instead, for error messages. Imports none of them."""

from __future__ import annotations

import functools
import json
import pkgutil
from typing import Any

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
_BASES = ("LightningModule", "LightningDataModule", "Callback")


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
