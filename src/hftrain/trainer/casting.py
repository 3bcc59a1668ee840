"""Mixed precision inside the model alone, where code of the user's computes with what the model returns."""

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
    """Run a plain model under the precision's autocast, and what surrounds it in float32.

    A loss of the user's own then gets float32 outputs, and its operations are not cast, as with transformers' Trainer.
    Where the model computes the loss itself, the whole step is cast instead, which copies no outputs.

    Args:
        computing: Makes the casting context.

    Attributes:
        is_on: Whether a model is cast so.
    """

    def __init__(self, computing: Computing) -> None:
        self._computing = computing
        self._changed: list[tuple[nn.Module, Any]] = []
        self.is_on = False

    def apply(self, model: nn.Module) -> None:
        """Let the model cast itself, once, after it was compiled; mutates it until `undo`."""
        if not any(model is other for other, _ in self._changed):
            before = model._compiled_call_impl
            self._changed.append((model, before))
            # In this place no copy and no saved model takes it along.
            model._compiled_call_impl = _Call(self._computing, before or model._call_impl)
            self.is_on = True

    def undo(self) -> None:
        """Leave every model as it was; safe to call twice."""
        for model, before in self._changed:
            model._compiled_call_impl = before
        self._changed.clear()
        self.is_on = False


def is_cast_inside(
    policy: PrecisionPolicy, strategy: Strategy, task: TaskModule, functions: Sequence[Callable[..., Any]]
) -> bool:
    """Return whether the model is to cast itself, rather than the whole step.

    Args:
        policy: The precision's.
        strategy: Where its engine casts, or copies call the original's forward pass, nothing else does.
        task: A plain model's, else the task casts its step.
        functions: Overrides and functions that may compute with what the model returns.
    """
    casts = policy.autocast and Owns.CASTING not in strategy.owns
    # Copies on several devices call the original's.
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
