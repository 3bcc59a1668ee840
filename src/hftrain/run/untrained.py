"""Warn once of parameters in no optimizer, and of a schedule that waits for evaluations that never run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.core.log import warn_once
from hftrain.core.types import Owns
from hftrain.optim.in_backward import UpdatesInBackward
from hftrain.run.own_optimizers import OwnOptimizers
from hftrain.strategies.base import Strategy, has_engine
from hftrain.task.module import TaskModule

_MAX_NAMES = 3


class Untrained:
    """Check after the first update for gradients that no optimizer uses, and at each log for unfrozen parameters.

    Skipped for engines that split the parameters, or step themselves: their optimizer has other parameters.

    Args:
        own: Finds the optimizers that user code keeps.
    """

    def __init__(
        self, strategy: Strategy, task: TaskModule, optimizer: torch.optim.Optimizer, own: OwnOptimizers
    ) -> None:
        self._task, self._optimizer, self._own = task, optimizer, own
        self._hook: Any = None
        is_split = Owns.STEP in strategy.owns or any(has_engine(strategy, engine) for engine in ("fsdp", "deepspeed"))
        self._frozen: list[tuple[str, nn.Parameter]] = []
        if not is_split and isinstance(optimizer, torch.optim.Optimizer):
            self._frozen = [(name, p) for name, p in task.model.named_parameters() if not p.requires_grad]
            self._hook = optimizer.register_step_post_hook(lambda *_: self._check_first())

    def check_unfrozen(self) -> None:
        """Warn of parameters that were unfrozen since the start of the run and are in no optimizer."""
        if any(parameter.requires_grad for _, parameter in self._frozen):
            held = self._held()
            names = [name for name, p in self._frozen if p.requires_grad and id(p) not in held]
            self._frozen = [(name, p) for name, p in self._frozen if not p.requires_grad]
            if names:
                warn_once(
                    f"{_listed(names)} no longer frozen, and no optimizer holds them: they are not trained. Add them "
                    "where they are unfrozen: optimizer.add_param_group({'params': [...]})."
                )

    def close(self) -> None:
        """Stop checking; safe to call twice."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _check_first(self) -> None:
        self.close()
        held, task = self._held(), self._task
        is_separate = not isinstance(self._optimizer, UpdatesInBackward)
        groups = self._optimizer.param_groups
        if is_separate and all(parameter.grad is None for group in groups for parameter in group["params"]):
            warn_once(
                "The first update changed nothing: no parameter had a gradient. An override of training_step must run "
                "the backward pass, as super().training_step(...) does."
            )
        reached = [name for name, p in task.named_parameters() if p.grad is not None and id(p) not in held]
        if reached:
            warn_once(
                f"The loss depends on {len(reached)} parameters that no optimizer holds ({_listed(reached)} not "
                "trained). Give them to an optimizer, or freeze them with requires_grad_(False)."
            )
        hidden = [name for name, p in _hidden(task) if p.grad is not None and id(p) not in held]
        if hidden:
            warn_once(
                f"The loss depends on parameters that are kept in a plain list, tuple or dict ({_listed(hidden)} not "
                "trained, not saved and not moved to the device). Keep them in nn.ModuleList, nn.ModuleDict or "
                "nn.ParameterList, inside the model."
            )

    def _held(self) -> set[int]:
        own = [each for each in self._own.find().values() if isinstance(each, torch.optim.Optimizer)]
        return {id(p) for each in (self._optimizer, *own) for group in each.param_groups for p in group["params"]}


def check_plateau(args: TrainingArguments, schedule: Any) -> None:
    """Warn if the user's own schedule depends on evaluations, and no setting enables them."""
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) and args.eval_strategy == "no":
        warn_once(
            f"{type(schedule).__name__} is stepped after each evaluation, but eval_strategy='no' asks for "
            "none: the learning rate stays as it is unless a callback evaluates. Set eval_strategy."
        )


def _hidden(task: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters in containers that torch does not search, by attribute path."""
    registered = {id(parameter) for parameter in task.parameters()}
    for path, module in task.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, dict):
                members = list(value.items())
            elif isinstance(value, (list, tuple)):
                members = list(enumerate(value))
            else:
                continue
            for key, member in members:
                where = f"{path}.{name}[{key!r}]".lstrip(".")
                if isinstance(member, nn.Module):
                    found = [(f"{where}.{inner}", p) for inner, p in member.named_parameters()]
                else:
                    found = [(where, member)] if isinstance(member, nn.Parameter) else []
                yield from (pair for pair in found if id(pair[1]) not in registered)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more} {'is' if len(names) == 1 else 'are'}"
