"""Checks of the optimizer and the schedule."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hftrain.core.errors import ConfigError
from hftrain.core.extras import extra
from hftrain.optim.groups import members_of
from hftrain.rules.functions import check_call
from hftrain.step.stepper import has_own_steps
from hftrain.task.module import TaskModule


def check_optimizer(optimizer: torch.optim.Optimizer, schedule: Any, model: nn.Module) -> None:
    """Raise unless the optimizer has parameters of the model, and the schedule belongs to that optimizer."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters()):
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
    if hasattr(schedule, "step") and not isinstance(schedule, ReduceLROnPlateau):
        check_call("schedule.step", schedule.step)


def check_step(kind: type[torch.optim.Optimizer]) -> None:
    """Raise if an optimizer's step calls the model again, as LBFGS does."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"Cannot train with {kind.__name__}.",
            "Its step needs a closure that runs the model again, and a step here runs it once: clipping, "
            "accumulation and the scaling of the loss would not reach what the closure computes.",
            "Use another optimizer, or step it in training_step of a task with automatic_optimization = False.",
        )


def read_optimizers(task: TaskModule) -> tuple[Any, Any]:
    """Return (optimizer, schedule) from the result of `configure_optimizers`; either may be None.

    Accepts None, an optimizer, a pair with its schedule, Lightning's ``{"optimizer": ..., "lr_scheduler": ...}``, and
    any of these by names.
    """
    made = task.configure_optimizers()
    if task.automatic_optimization and (made is None or isinstance(made, Optimizer)):
        return made, None
    optimizer, schedule = extra("own_optimizers").read_own(task, made)
    return optimizer, schedule
