"""Mixed precision inside the model only, for user code that computes with the model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hftrain.core.tree import map_tensors
from hftrain.core.types import Owns, PrecisionPolicy
from hftrain.step.computing import Computing
from hftrain.strategies.base import Strategy
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule

_HALVES = (torch.bfloat16, torch.float16)


def to_float32(tree: Any) -> Any:
    """Return the same structure with its half-precision tensors in float32."""
    return map_tensors(tree, lambda tensor: tensor.float() if tensor.dtype in _HALVES else tensor)


class ModelCasting:
    """Run a plain model under the precision's autocast, and the code around it in float32.

    A user's loss function then gets float32 outputs, and its operations are not cast, as with transformers' Trainer.
    If the model computes the loss itself, the whole step is cast instead, which copies no outputs.

    Args:
        computing: Creates the casting context.

    Attributes:
        is_on: Whether a model casts itself.
    """

    def __init__(self, computing: Computing) -> None:
        self._computing = computing
        self._changed: list[tuple[nn.Module, Any]] = []
        self.is_on = False

    def apply(self, model: nn.Module) -> None:
        """Make the model cast itself, once, after compilation; mutates it until `undo`."""
        if not any(model is other for other, _ in self._changed):
            before = model._compiled_call_impl
            self._changed.append((model, before))
            # This attribute is not part of copies or saved models.
            model._compiled_call_impl = _Call(self._computing, before or model._call_impl)
            self.is_on = True

    def undo(self) -> None:
        """Restore every model; safe to call twice."""
        for model, before in self._changed:
            model._compiled_call_impl = before
        self._changed.clear()
        self.is_on = False


def is_cast_inside(
    policy: PrecisionPolicy, strategy: Strategy, task: TaskModule, functions: Sequence[Callable[..., Any]]
) -> bool:
    """Return whether only the model is cast, rather than the whole step.

    Args:
        policy: The precision's policy.
        strategy: The model is not cast if the strategy's engine casts or has copies on several devices.
        task: The model is cast only for a plain model's task.
        functions: Overrides and functions that may compute with the model's outputs.
    """
    casts = policy.autocast and Owns.CASTING not in strategy.owns
    # Copies on several devices call the original's forward pass.
    is_copied = getattr(strategy, "num_devices", 1) > 1
    if not casts or is_copied or not isinstance(task, ModelTask):
        return False
    return any(str(getattr(each, "__module__", "")).partition(".")[0] != "hftrain" for each in functions)


class _Call:
    def __init__(self, computing: Computing, call: Any) -> None:
        self.computing = computing
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.computing.autocast():
            outputs = self.call(*args, **kwargs)
        return to_float32(outputs)
