"""Checks of the Trainer's constructor: its arguments, model, functions and keywords, and what a subclass defines."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.core.elsewhere import is_meant, names_elsewhere, warn_of_uncalled, word_uncalled
from hftrain.core.errors import ConfigError, TaskError, UnknownArgumentError, a_kind
from hftrain.core.extras import extra
from hftrain.core.log import warn_once
from hftrain.rules.task import check_call, check_callable, check_not_lightning

Init = TypeVar("Init", bound=Callable[..., None])


class NoModelError(ConfigError, RuntimeError):
    """A Trainer was constructed without a model; the documented error is a `RuntimeError`."""


def check_arguments(args: Any) -> None:
    """Raise unless the arguments are hftrain's: another library's have other fields and defaults."""
    if not isinstance(args, TrainingArguments):
        cls = type(args)
        full_name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
        remedy = "Call Trainer(model, TrainingArguments(output_dir), ...)"
        if cls.__name__.endswith("TrainingArguments"):
            remedy = f"Import {cls.__name__} from hftrain; the settings have the same names"
        elif isinstance(args, dict):
            remedy = "Pass TrainingArguments(**settings)"
        raise ConfigError(f"Cannot use {full_name} as args:", "it must be hftrain's TrainingArguments.", f"{remedy}.")


def check_model(model: Any, model_init: Any) -> None:
    """Raise unless a model or `model_init` is given; warn if both are."""
    if model is None and model_init is None:
        raise NoModelError(
            "Cannot make a Trainer without model and without model_init:",
            "`Trainer` requires either a `model` or `model_init` argument.",
            "Pass a TaskModule or an nn.Module as model, or a function that builds one as model_init.",
        )
    if isinstance(model_init, nn.Module) or (model_init is not None and not callable(model_init)):
        raise ConfigError(
            f"Cannot use {a_kind(model_init)} as model_init:",
            "it must be a function that returns a new model.",
            "Pass it as model=..., or a function." if isinstance(model_init, nn.Module) else "",
        )
    check_not_lightning(model)
    if isinstance(model, nn.Module) and "_modules" not in vars(model):
        raise TaskError(
            f"Cannot use {type(model).__name__}:",
            "its __init__ does not call that of its base class.",
            "Call super().__init__() in its first line.",
        )
    if model is not None and not isinstance(model, nn.Module):
        name = model.__name__ if isinstance(model, type) else None
        remedy = f"Pass {name}(...)." if name else "Pass a TaskModule or an nn.Module."
        if isinstance(model, (str, Path)):
            remedy = "Load it first, for example with AutoModelForSequenceClassification.from_pretrained(name)."
        elif isinstance(model, TrainingArguments):
            remedy = "The order is Trainer(model, args, ...)."
        elif isinstance(model, dict):
            remedy = "Build the model, call model.load_state_dict(...), and pass the model."
        raise TaskError(
            f"Cannot use {f'the class {name}' if name else a_kind(model)} as model:",
            "an instance is needed." if name and issubclass(model, nn.Module) else "it is not an nn.Module.",
            remedy,
        )
    if model is not None and model_init is not None:
        warn_once("Both model and model_init are set: train() replaces model with what model_init returns.")


def check_parts(
    *, model_init: Any, optimizers: tuple[Any, Any], optimizer_cls_and_kwargs: Any, functions: dict[str, Any]
) -> None:
    """Raise if constructor arguments contradict each other, or one that must be callable is not."""
    if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
        raise ConfigError(
            f"Cannot use {a_kind(optimizers)} as optimizers:",
            "it must be a pair of an optimizer and a schedule.",
            "Pass optimizers=(optimizer, None), or (optimizer, schedule).",
        )
    has_optimizers = any(part is not None for part in optimizers)
    if model_init is not None and has_optimizers:
        raise ConfigError(
            "Cannot use optimizers=(...) together with model_init.",
            "model_init makes a new model, whose parameters the given optimizer does not hold.",
            "Override create_optimizer_and_scheduler, or pass optimizer_cls_and_kwargs.",
        )
    if optimizer_cls_and_kwargs is not None and optimizers[0] is not None:
        raise ConfigError(
            "Cannot use optimizers=(...) together with optimizer_cls_and_kwargs.",
            "Both choose the optimizer.",
            "Remove one of the two.",
        )
    if isinstance(optimizers[0], type):
        name = optimizers[0].__name__
        raise ConfigError(
            f"Cannot use the class {name} in optimizers:",
            "it must be an optimizer of the model's parameters.",
            f"Pass optimizer_cls_and_kwargs=({name}, {{'lr': ...}}), or ({name}(model.parameters(), lr=...), None).",
        )
    for name, function in functions.items():
        if function is not None:
            (check_call if name.endswith("_collator") else check_callable)(name, function)


def refusing_unknown(init: Init) -> Init:
    """Make a constructor raise for unknown keywords with a remedy; its signature is unchanged."""
    keywords = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in keywords:
                class_name = type(self).__name__
                problem = f"Cannot pass {name}= to {class_name}: there is no such argument."
                raise UnknownArgumentError(problem, "", extra("mistakes").answer_keyword(name, keywords))
        init(self, *args, **kwargs)

    return cast(Init, checked)


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
