"""Rules about what users hand in to call or to step: functions, optimizers and schedules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError, TaskError, a_kind
from hftrain.core.extras import extra
from hftrain.optim.groups import members_of
from hftrain.optim.schedules import follows_metric
from hftrain.step.stepper import has_own_steps
from hftrain.task.module import TaskModule

# Role -> the number of positional arguments, a keyword that may be passed, and the signature for errors.
_CALLS: dict[str, tuple[int, str, str]] = {
    "compute_loss_func": (2, "num_items_in_batch", "(outputs, labels, num_items_in_batch=None)"),
    "compute_metrics": (
        1,
        "compute_result",
        "(prediction), an EvalPrediction: prediction has predictions and label_ids",
    ),
    "data_collator": (1, "", "(samples), with a list of samples; datasets go by name (train_dataset=...)"),
    "eval_collator": (1, "", "(samples), with a list of samples"),
    "schedule.step": (0, "", "(), after each update; make timm's step_update(count) the step() of an object around it"),
    "preprocess_logits_for_metrics": (2, "", "(logits, labels)"),
}


def check_callable(role: str, function: Any) -> None:
    """Raise unless a value can be called."""
    if not callable(function):
        remedy = f"Pass a function, which is called as {role}{_CALLS[role][2]}" if role in _CALLS else "Pass a function"
        remedy += ", or override compute_loss" if role == "compute_loss_func" else ""
        raise ConfigError(f"Cannot use {a_kind(function)} as {role}:", "it is not callable.", f"{remedy}.")


def check_call(role: str, function: Callable[..., Any]) -> None:
    """Raise if a function cannot be called with the arguments of its role; those of unknown roles are not checked.

    Raises:
        ConfigError: It cannot be called at all.
        TaskError: It takes other arguments, or is a module class instead of an instance.
    """
    check_callable(role, function)
    if role not in _CALLS:
        return
    num_positional, keyword, signature_text = _CALLS[role]
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(function, type) and issubclass(function, nn.Module):
        raise TaskError(f"Cannot use the class {name} as {role}:", "calling it makes a module.", f"Pass {name}().")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C
        return
    reason = ""
    for keywords in ({}, {keyword: None} if keyword else {}):
        try:
            signature.bind(*[None] * num_positional, **keywords)
            return
        except TypeError as error:
            reason = reason or str(error)
    raise TaskError(
        f"Cannot call {name} as {role} ({reason}):",
        f"it is called as {role}{signature_text}.",
        f"Pass an instance: {name}()." if isinstance(function, type) else "Give it these parameters.",
    )


def check_optimizer(optimizer: torch.optim.Optimizer, schedule: Any, model: nn.Module) -> None:
    """Raise unless the optimizer has parameters of the model, and the schedule belongs to that optimizer."""
    parameter_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in parameter_ids for parameter in model.parameters()):
        raise ConfigError(
            f"Cannot train {type(model).__name__} with this {type(optimizer).__name__}:",
            "it holds none of the model's parameters, so nothing would change.",
            "Make it from model.parameters() of the model that you pass; after replacing the model, set "
            "trainer.optimizer and trainer.lr_scheduler to None.",
        )
    if not has_own_steps(optimizer):
        for member in members_of(optimizer):
            check_step(type(member))
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            f"Cannot use this {type(schedule).__name__}:",
            "it changes the learning rate of another optimizer than the one that trains.",
            "Make it from the optimizer that you pass.",
        )
    if hasattr(schedule, "step") and not follows_metric(schedule):
        check_call("schedule.step", schedule.step)


def check_step(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Raise if an optimizer's step calls the model again, as LBFGS does."""
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"Cannot train with {optimizer_class.__name__}.",
            "Its step needs a closure that runs the model again, and a step here runs it once: clipping, "
            "accumulation and the scaling of the loss would not reach what the closure computes.",
            "Use another optimizer, or step it in training_step of a task with automatic_optimization = False.",
        )


def read_optimizers(task: TaskModule) -> tuple[Any, Any]:
    """Return (optimizer, schedule) from the result of `configure_optimizers`; either may be None.

    Accepts None, an optimizer, a pair with its schedule, Lightning's ``{"optimizer": ..., "lr_scheduler": ...}``, and
    any of these by names.
    """
    result = task.configure_optimizers()
    if task.automatic_optimization and (result is None or isinstance(result, Optimizer)):
        return result, None
    optimizer, schedule = extra("own_optimizers").read_optimizers(task, result)
    return optimizer, schedule
