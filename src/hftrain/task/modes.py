"""Training mode at each step, without walking over all modules, and the weights of optimizers that keep two sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import itemgetter
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from hftrain.core.log import warn_once
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule


def training_weights(optimizer: Any) -> AbstractContextManager[None]:
    """Give the model the training weights in the context, and the evaluation weights after it. Mutates the parameters.

    Only optimizers with the methods ``train()`` and ``eval()`` keep two sets of weights.

    Source: Defazio et al., 2024, arXiv 2405.15682.
    """
    return _between(optimizer.train, optimizer.eval) if keeps_two_weights(optimizer) else nullcontext()


def evaluation_weights(optimizer: Any) -> AbstractContextManager[None]:
    """Give the model the evaluation weights in the context, and the previous ones after it. Mutates the parameters."""
    holds_others = keeps_two_weights(optimizer) and optimizer.param_groups[0].get("train_mode", False)
    return _between(optimizer.eval, optimizer.train) if holds_others else nullcontext()


def keeps_two_weights(optimizer: Any) -> bool:
    """Return whether an optimizer's training weights differ from those to evaluate and save."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


@contextmanager
def _between(enter: Callable[[], Any], leave: Callable[[], Any]) -> Iterator[None]:
    enter()
    try:
        yield
    finally:
        leave()


is_on = itemgetter("training")
"""Reads a module's mode from its `vars`."""

# The train() overrides of these packages do the same each time, so one call is enough.
_LIBRARIES = frozenset({"accelerate", "deepspeed", "hftrain", "peft", "torch", "transformers"})
# Flags that are never all on, so that `enter` is called at each step.
_NEVER_ON: tuple[dict[str, Any], ...] = ({"training": False},)


class TrainingMode:
    """Keep a model in training mode for a run, as the documented ``model.train()`` of each step does.

    ``model.train()`` takes about 2 microseconds per module. Reading all modes takes 1/150 of that, so `enter` is called
    only when one of them is off: ``all(map(is_on, mode.flags))``. If a user's class overrides `train`, it is
    called at each step, as documented. Modules that are still in evaluation mode after the call are ignored.

    A `TaskModule` keeps the modules in evaluation mode that its user has put there before the run: a frozen teacher, a
    normalization with fixed statistics.

    Args:
        task: Its model is put into training mode; its other children are left as they are.
        optimizer: Its `train` is called as well, if it keeps two kinds of weights.
    """

    def __init__(self, task: TaskModule, optimizer: Any = None) -> None:
        self.task = task
        self.model: nn.Module | None = None
        self.flags = _NEVER_ON
        self._eval_modules: list[nn.Module] = []
        if isinstance(task, ModelTask):
            _name_frozen(task.model)
        elif not any(map(_is_users, task.modules())):
            parts = [part for child in task.children() for _, part in _quiet_parts(child)]
            modules = (module for part in parts for module in part.modules())
            self._eval_modules = [module for module in modules if not vars(module).get("training", True)]
        self.train_weights: Callable[[], Any] | None = optimizer.train if keeps_two_weights(optimizer) else None
        # A module that is added later may be in either mode.
        self._hook = register_module_module_registration_hook(self._forget)

    def close(self) -> None:
        """Stop watching for added modules; safe to call twice."""
        self._hook.remove()

    def enter(self, model: nn.Module) -> None:
        """Put `model` into training mode; mutates its modules."""
        task = self.task
        if model is task.model and _is_users(task):
            task.train()
        else:
            model.train()
        for module in self._eval_modules:
            module.training = False
        if model is not task.model:
            return
        task.training = True
        modules = (task, *model.modules())
        is_watched = not any(map(_is_users, modules))
        self.model = model
        # A torch.compile wrapper has no `training` attribute.
        flags = (vars(module) for module in modules)
        self.flags = tuple(each for each in flags if each.get("training")) if is_watched else _NEVER_ON

    def _forget(self, *registered: Any) -> None:
        self.flags = _NEVER_ON


def _quiet_parts(module: nn.Module, name: str = "", *, is_whole: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost parts that a user has put into evaluation mode, each with its name.

    Nobody has chosen that mode for a trained model that is in it as a whole, or as `from_pretrained` returns it.
    """
    is_on, is_trained = vars(module).get("training", True), any(p.requires_grad for p in module.parameters())
    is_pretrained = is_trained and not is_on and hasattr(type(module), "from_pretrained")
    if is_on or (is_whole and is_trained and not is_pretrained):
        for key, child in module.named_children():
            yield from _quiet_parts(child, f"{name}.{key}" if name else key, is_whole=is_whole and not is_on)
    elif not is_pretrained:
        yield name, module


def _name_frozen(model: nn.Module) -> None:
    """Name once the frozen parts of a plain model that a user has put into evaluation mode, which will not stay."""
    names = [
        name
        for name, part in _quiet_parts(model)
        if any(map(_depends_on_mode, part.modules())) and not any(p.requires_grad for p in part.parameters())
    ]
    if names:
        warn_once(
            f"{', '.join(names)} of {type(model).__name__}: frozen and put into evaluation mode, but trained "
            "in training mode, as with transformers' Trainer: dropout acts, and batch statistics change. To keep "
            "evaluation mode, override the model's train(), or train a TaskModule, whose modules keep their modes."
        )


def _depends_on_mode(module: nn.Module) -> bool:
    return bool(getattr(module, "p", 0)) or getattr(module, "running_mean", None) is not None


@contextmanager
def preserved_modes(module: nn.Module) -> Iterator[None]:
    """Restore the mode of each module at the end."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, was_training in modes:
            part.training = was_training


def _is_users(module: nn.Module) -> bool:
    train = type(module).train
    return train is not nn.Module.train and train.__module__.partition(".")[0] not in _LIBRARIES
