"""Checks of the Trainer's constructor: its arguments, model, functions and unknown keywords."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import ConfigError, TaskError, UnknownArgumentError, a_kind
from hftrain.core.extras import extra
from hftrain.core.log import warn_once
from hftrain.rules.functions import check_call, check_callable
from hftrain.rules.task import check_not_lightning

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
