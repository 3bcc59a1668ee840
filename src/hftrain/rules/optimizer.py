"""Checks of the optimizer and the schedule."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import ConfigError, TaskError


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
    check_step(type(optimizer))
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            f"Cannot use this {type(schedule).__name__}:",
            "it changes the learning rate of another optimizer than the one that trains.",
            "Make it from the optimizer that you pass.",
        )


def check_step(kind: type[torch.optim.Optimizer]) -> None:
    """Raise if an optimizer's step calls the model again, as LBFGS does."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"Cannot train with {kind.__name__}.",
            "Its step needs a closure that runs the model again, and a step here runs it once: clipping, "
            "accumulation and the scaling of the loss would not reach what the closure computes.",
            "Use another optimizer, or run it yourself in an override of training_step.",
        )


def read_optimizers(made: Any, *, maker: str) -> tuple[Any, Any]:
    """Return (optimizer, schedule) from the result of `configure_optimizers`; either may be None."""
    optimizer, schedule = made if isinstance(made, (tuple, list)) and len(made) == 2 else (made, None)
    is_schedule = schedule is None or (hasattr(schedule, "step") and not isinstance(schedule, torch.optim.Optimizer))
    if (optimizer is None or isinstance(optimizer, torch.optim.Optimizer)) and is_schedule:
        return optimizer, schedule
    shown = ", ".join(type(part).__name__ for part in made) if isinstance(made, (tuple, list)) else ""
    raise TaskError(
        f"Cannot use what {maker}.configure_optimizers returned:",
        f"it is a {type(made).__name__}{f' of ({shown})' if shown else ''}.",
        f"{_remedy(made)} None takes both from the arguments.",
    )


def _remedy(made: Any) -> str:
    """Return what `configure_optimizers` should return instead, for errors."""
    parts = made if isinstance(made, (tuple, list)) else (made,)
    if isinstance(made, type):
        return f"Call it: return {made.__name__}(self.model.parameters(), lr=...)."
    if sum(isinstance(part, torch.optim.Optimizer) for part in parts) > 1:
        return "Return one optimizer; different settings go into its param_groups, which are stepped together."
    if len(parts) == 1 and hasattr(made, "optimizer") and hasattr(made, "step"):
        return "Return (optimizer, schedule)."
    if len(parts) == 2 and isinstance(parts[0], torch.optim.Optimizer) and callable(parts[1]):
        return "Make a schedule of the function: LambdaLR(optimizer, function)."
    return "Return one optimizer, or one pair (optimizer, schedule) with a schedule that is stepped once per update."
