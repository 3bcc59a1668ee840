"""Training mode at each step, without walking over all modules."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from hftrain.optim.weight_modes import keeps_two
from hftrain.task.module import TaskModule

is_on = itemgetter("training")
"""Reads a module's mode from its `vars`."""

# The train() overrides of these packages do the same each time, so one call is enough.
_LIBRARIES = frozenset({"accelerate", "deepspeed", "hftrain", "peft", "torch", "transformers"})
_OFF: tuple[dict[str, Any], ...] = ({"training": False},)


class TrainingMode:
    """Keep a model in training mode for a run, as the documented ``model.train()`` of each step does.

    ``model.train()`` takes about 2 microseconds per module. Reading all modes takes 1/150 of that, so `enter` is called
    only when one of them is off: ``all(map(is_on, mode.flags))``. If a user's class overrides `train`, it is
    called at each step, as documented. Modules that are still in evaluation mode after the call are ignored.

    Args:
        task: Its model is put into training mode; its other children are left as they are.
        optimizer: Its `train` is called as well, if it keeps two kinds of weights.
    """

    def __init__(self, task: TaskModule, optimizer: Any = None) -> None:
        self.task = task
        self.model: nn.Module | None = None
        self.flags = _OFF
        self.train_weights: Callable[[], Any] | None = optimizer.train if keeps_two(optimizer) else None
        # A module that is added later may be in either mode.
        self._hook = register_module_module_registration_hook(self._forget)

    def close(self) -> None:
        """Stop watching for added modules; safe to call twice."""
        self._hook.remove()

    def enter(self, model: nn.Module) -> None:
        """Put `model` into training mode; mutates its modules."""
        task = self.task
        if model is not task.model:
            model.train()
            return
        if _is_users(task):
            task.train()
        else:
            model.train()
            task.training = True
        modules = (task, *model.modules())
        is_watched = not any(map(_is_users, modules))
        self.model = model
        # A torch.compile wrapper has no `training` attribute.
        flags = (vars(module) for module in modules)
        self.flags = tuple(each for each in flags if each.get("training")) if is_watched else _OFF

    def _forget(self, *registered: Any) -> None:
        self.flags = _OFF


def _is_users(module: nn.Module) -> bool:
    """Return whether a module's `train` is user code."""
    train = type(module).train
    return train is not nn.Module.train and train.__module__.partition(".")[0] not in _LIBRARIES
