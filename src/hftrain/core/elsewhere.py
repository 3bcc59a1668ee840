"""Names of other libraries, and what to do instead; and what libraries put in place of transformers' own."""

from __future__ import annotations

import functools
import json
import pkgutil
from collections.abc import Mapping, Sequence
from types import ModuleType
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


# Names that hftrain reads; a program creates objects of the others itself.
_READ = frozenset({"DEFAULT_CALLBACKS", "DEFAULT_PROGRESS_CALLBACK", "INTEGRATION_TO_CALLBACK", "PrinterCallback"})
_CREATED = frozenset({"Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments"})
# Names that matter in a resume only.
_IN_RESUMES = {
    "deepspeed_load_checkpoint": "hftrain loads DeepSpeed's state at a resume.",
    "skip_first_batches": "hftrain continues at its place in the data.",
}

# The functions and classes of each module as `hftrain.compat` left them; the first module is `transformers.trainer`.
watched: list[tuple[ModuleType, dict[str, Any]]] = []


def watch_modules(modules: Sequence[ModuleType]) -> None:
    """Remember the modules' functions and classes, and read defaults from the first module from now on."""
    forget_modules()
    for module in modules:
        names = {name: value for name, value in vars(module).items() if callable(value)}
        watched.append((module, {name: value for name, value in names.items() if name not in _READ | _CREATED}))


def forget_modules() -> None:
    """Forget the modules; hftrain's own defaults hold."""
    watched.clear()


def default_of(name: str, ours: Any) -> Any:
    """Return what a name of `transformers.trainer` holds while the modules are watched, otherwise `ours`."""
    return getattr(watched[0][0], name, ours) if watched else ours


def tracker_of(name: str) -> Any:
    """Return the callback, or its class, that transformers has for a tracker; None unless the modules are watched."""
    for module, _ in watched:
        if hasattr(module, "INTEGRATION_TO_CALLBACK"):
            return module.INTEGRATION_TO_CALLBACK.get(name)
    return None


def warn_of_unread(*, is_resume: bool) -> None:
    """Warn once of functions and classes that a library has replaced and that a training does not call."""
    for module, names in watched:
        for name, value in names.items():
            replacement = getattr(module, name, None)
            if replacement is not value and replacement is not None and (is_resume or name not in _IN_RESUMES):
                owner = getattr(replacement, "__module__", None) or type(replacement).__module__
                remedies = {**names_elsewhere("transformers_names"), **_IN_RESUMES}
                remedy = remedies.get(name, "Override a method of the Trainer, or pass a callback.")
                place = f"{module.__name__}.{name}"
                warn_once(f"{place} was replaced (by {owner}), but hftrain's Trainer does not call it. {remedy}")
