"""Clip gradients by value, per parameter group, or relative to the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import ConfigError
from hftrain.step.legality import check_gradients_at_hand

_TYPES = ("value", "group", "adaptive")
# The weights of a unit count at least this much, so that those that start at zero can grow; and no division by zero.
_SMALLEST_WEIGHT, _SMALLEST_GRADIENT = 1e-3, 1e-6


class GradientClipping(TrainerCallback):
    """Clip the averaged and unscaled gradients before each update, in place of `max_grad_norm`, which must be 0.

    Args:
        clipping_type: ``"value"``: each element to [-threshold, threshold]. ``"group"``: the norm of each parameter
            group of the optimizer; a group's own ``"max_grad_norm"`` replaces the threshold, and `grad_norm` in the
            logs is the norm of all. ``"adaptive"``: the norm of each unit to threshold times that of its weights, at
            least 0.001; a unit is a row of a matrix, a filter of a convolution, or a whole vector.
        clipping_threshold: Above 0.

    Raises:
        ConfigError: There is no such type, the threshold is not positive, `max_grad_norm` clips too, or the optimizer
            updates before its gradients could be clipped.
        StrategyError: The strategy has the gradients in its own hands (DeepSpeed).

    Source: Brock et al., 2021, arXiv 2102.06171 (adaptive).

    Example:
        >>> clipping = GradientClipping("value", 0.5)  # Trainer(..., callbacks=[clipping]), with max_grad_norm=0
    """

    def __init__(self, clipping_type: str, clipping_threshold: float) -> None:
        if clipping_type not in _TYPES or not clipping_threshold > 0:
            raise ConfigError(
                f"Cannot clip with clipping_type={clipping_type!r} and clipping_threshold={clipping_threshold}.",
                f"The type must be one of {', '.join(_TYPES)}, and the threshold above 0.",
                "Correct it; the norm of all gradients together is clipped by max_grad_norm.",
            )
        self.clipping_type, self.clipping_threshold = clipping_type, clipping_threshold

    def wrap_stepper(self, stepper: Any, *, args: Any, optimizer: Any, strategy: Any, precision: Any, **_: Any) -> Any:
        """Return the calls of a step, with this clipping after what `max_grad_norm=0` leaves to do."""
        check_gradients_at_hand(self, optimizer, strategy)
        if args.max_grad_norm:
            raise ConfigError(
                f"Cannot clip by {self.clipping_type} with max_grad_norm={args.max_grad_norm}.",
                "The norm of all gradients would be clipped first, which leaves little or nothing to this clipping.",
                "Set max_grad_norm=0, or leave GradientClipping out.",
            )
        clip = getattr(self, f"_clip_{self.clipping_type}")

        def clip_all() -> Any:
            stepper.clip()  # averages what the strategy does not
            precision.unscale(optimizer)
            return clip(optimizer.param_groups, strategy)

        return replace(stepper, clip=clip_all)

    @torch.no_grad()
    def _clip_value(self, groups: Any, strategy: Any) -> None:
        for _, gradient in _gradients(groups):
            shard = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # its shard
            shard.clamp_(-self.clipping_threshold, self.clipping_threshold)

    def _clip_group(self, groups: Any, strategy: Any) -> Any:
        norms = [
            strategy.clip_grad_norm(group["params"], group.get("max_grad_norm", self.clipping_threshold))
            for group in groups
        ]
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def _clip_adaptive(self, groups: Any, strategy: Any) -> None:
        for parameter, gradient in _gradients(groups):
            largest = _unit_norms(parameter).clamp(min=_SMALLEST_WEIGHT) * self.clipping_threshold
            gradient.mul_((largest / _unit_norms(gradient).clamp(min=_SMALLEST_GRADIENT)).clamp(max=1.0))


def _gradients(groups: Any) -> Any:
    return [(p, p.grad) for group in groups for p in group["params"] if p.grad is not None]


def _unit_norms(tensor: torch.Tensor) -> torch.Tensor:
    dims = tuple(range(1, tensor.dim())) if tensor.dim() > 1 else None
    norms: torch.Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=True)
    return norms
