"""What libraries put in the place of names in transformers' training modules while `hftrain.compat` is installed."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from hftrain.core.elsewhere import names_elsewhere
from hftrain.core.log import warn_once

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
