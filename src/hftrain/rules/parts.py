"""What a Trainer is made of: its arguments, its model, what belongs to it, and keywords that it does not take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn

from hftrain.arguments.renames import COMMON_NAMES
from hftrain.arguments.seq2seq import Seq2SeqTrainingArguments
from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import ConfigError, TaskError, UnknownArgumentError, suggest
from hftrain.core.lightning import TRAINER_KEYWORDS
from hftrain.core.log import warn_once
from hftrain.rules.task import check_not_lightning

Init = TypeVar("Init", bound=Callable[..., None])


class NoModelError(ConfigError, RuntimeError):
    """A Trainer was made without a model; the documented error is a `RuntimeError`."""


def check_arguments(args: Any) -> None:
    """Raise unless the arguments are hftrain's: another library's have other fields and defaults."""
    if not isinstance(args, TrainingArguments):
        kind = type(args)
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} was given as args.",
            "Only hftrain's own TrainingArguments are read.",
            "Import TrainingArguments from hftrain, and call Trainer(model, TrainingArguments(output_dir), ...).",
        )


def check_model(model: Any, model_init: Any) -> None:
    """Raise unless there is a way to get a model; warn if there are two."""
    if model is None and model_init is None:
        raise NoModelError(
            "Cannot make a Trainer without model and without model_init:",
            "`Trainer` requires either a `model` or `model_init` argument.",
            "Pass a TaskModule or an nn.Module as model, or a function that builds one as model_init.",
        )
    if model_init is not None and not callable(model_init):
        raise ConfigError(
            "model_init was given.",
            "It cannot be called.",
            "Pass a function that returns the model.",
            model_init=model_init,
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
        raise TaskError(
            f"{f'The class {name}' if name else f'A {type(model).__name__}'} was given as model.",
            "It is not an nn.Module.",
            f"Pass {name}(...)." if name else "Pass a TaskModule or an nn.Module.",
        )
    if model is not None and model_init is not None:
        warn_once("model and model_init were given: train() replaces model with what model_init returns.")


def check_parts(*, model_init: Any, optimizers: tuple[Any, Any], optimizer_cls_and_kwargs: Any, collator: Any) -> None:
    """Raise where constructor arguments contradict each other."""
    if not isinstance(optimizers, (tuple, list)) or len(optimizers) != 2:
        raise ConfigError(
            "optimizers was given.",
            "It is not a pair of an optimizer and a schedule.",
            "Pass (optimizer, schedule); either may be None.",
            optimizers=optimizers,
        )
    has_optimizers = any(part is not None for part in optimizers)
    if model_init is not None and has_optimizers:
        raise ConfigError(
            "optimizers=(...) was given together with model_init.",
            "model_init makes a new model, whose parameters the given optimizer does not hold.",
            "Override create_optimizer_and_scheduler, or pass optimizer_cls_and_kwargs.",
        )
    if optimizer_cls_and_kwargs is not None and optimizers[0] is not None:
        raise ConfigError(
            "optimizers=(...) was given together with optimizer_cls_and_kwargs.",
            "Both choose the optimizer.",
            "Keep one of the two.",
        )
    if collator is not None and not callable(collator):
        raise ConfigError(
            f"Cannot use a {type(collator).__name__} as data_collator:",
            "it is not callable.",
            "Pass a function that takes a list of samples; datasets go by name (train_dataset=..., eval_dataset=...).",
        )


def refusing_unknown(init: Init) -> Init:
    """Let a constructor refuse keywords that it does not take; its signature stays as it is."""
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                kind = type(self).__name__
                asked = f"Cannot pass {name}= to {kind}."
                raise UnknownArgumentError(asked, f"{kind} has no such argument.", _remedy(name, known))
        init(self, *args, **kwargs)

    return cast(Init, checked)


def _remedy(name: str, known: list[str]) -> str:
    settings = inspect.signature(Seq2SeqTrainingArguments).parameters
    setting = name if name in settings else COMMON_NAMES.get(name)
    if name in TRAINER_KEYWORDS:
        return TRAINER_KEYWORDS[name]
    return f"Set it in the arguments: TrainingArguments({setting}=...)." if setting else suggest(name, known)
