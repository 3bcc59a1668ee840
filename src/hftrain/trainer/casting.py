"""Mixed precision inside the model alone, where code of the user's computes with what the model returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrain.core.tree import map_tensors
from hftrain.core.types import Owns
from hftrain.task.model_task import ModelTask

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

_HALVES = (torch.bfloat16, torch.float16)
_SEE_OUTPUTS = ("compute_loss", "training_step", "prediction_step")


def to_float32(tree: Any) -> Any:
    """Return the same structure with its half-precision tensors in float32."""
    return map_tensors(tree, lambda tensor: tensor.float() if tensor.dtype in _HALVES else tensor)


class ModelCasting:
    """Run a plain model under the precision's autocast, and what surrounds it in float32.

    A loss of the user's own then gets float32 outputs, and its operations are not cast, as with transformers' Trainer.
    Where the model computes the loss itself, the whole step is cast instead, which copies no outputs.

    Args:
        trainer: Says who computes with the outputs.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._changed: list[tuple[nn.Module, Any]] = []

    @property
    def is_on(self) -> bool:
        """Whether a model is cast so."""
        return bool(self._changed)

    def apply(self, model: nn.Module) -> None:
        """Let the model cast itself, once, after it was compiled; mutates it until `undo`."""
        if self._is_wanted() and not any(model is other for other, _ in self._changed):
            before = model._compiled_call_impl
            self._changed.append((model, before))
            # In this place no copy and no saved model takes it along.
            model._compiled_call_impl = _Call(self.trainer, before or model._call_impl)

    def undo(self) -> None:
        """Leave every model as it was; safe to call twice."""
        for model, before in self._changed:
            model._compiled_call_impl = before
        self._changed.clear()

    def _is_wanted(self) -> bool:
        trainer, strategy = self.trainer, self.trainer.strategy
        casts = trainer.precision.policy.autocast and Owns.CASTING not in strategy.owns and not trainer._makes_contexts
        # Copies on several devices call the original's.
        is_copied = getattr(strategy, "num_devices", 1) > 1
        if not casts or is_copied or not isinstance(trainer.task, ModelTask):
            return False
        methods = [getattr(trainer, name) for name in _SEE_OUTPUTS if trainer._is_overridden(name)]
        is_users = any(str(getattr(method, "__module__", "")).partition(".")[0] != "hftrain" for method in methods)
        return is_users or callable(trainer.compute_loss_func)


class _Call:
    def __init__(self, trainer: Trainer, call: Any) -> None:
        self.trainer = trainer
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.trainer._autocast():
            outputs = self.call(*args, **kwargs)
        return to_float32(outputs)
