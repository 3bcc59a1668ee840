"""The calls of one optimizer step, the current ones of forward and backward passes, and what averages gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from hftrain.precision.base import Precision
from hftrain.strategies.base import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepper:
    """The calls of a step, resolved once so that steps make no decisions.

    Args:
        autocast: Returns the context of a forward pass; call it once per micro-step.
        backward: Accumulates the gradients of one micro-step's loss; takes the keywords of `torch.Tensor.backward`.
        clip: Clips the accumulated gradients and returns their norm before that (a 0-d tensor on the device), or None
            if clipping is off or the strategy's engine clips. Collective.
        step: Updates the parameters and returns False if an overflow made it skip. Collective; synchronises with the
            device in fp16 only.
        zero_grad: Drops the gradients.
    """

    autocast: Callable[[], AbstractContextManager[Any]]
    backward: Callable[..., None]
    clip: Callable[[], torch.Tensor | None]
    step: Callable[[], bool]
    zero_grad: Callable[[], None]


@dataclass(slots=True)
class StepCalls:
    """The current settings of forward and backward passes.

    Attributes:
        backward: Runs backward on a loss.
        autocast: Returns the precision's casting context.
        input_dtype: The dtype that floating-point inputs are cast to; None leaves them as they are.
        optimizer: The optimizer of the run; None outside of training.
        syncs: Whether an update follows the current micro-step.
        past: The output that a recurrent model passes from step to step (`past_index`).
        accelerator: The user's way to the run, if it has been used; a method assigned to it replaces the run's.
        own_backward: The backward of the accelerator that is the run's.
    """

    backward: Callable[..., None]
    autocast: Callable[[], AbstractContextManager[Any]]
    input_dtype: torch.dtype | None = None
    optimizer: torch.optim.Optimizer | None = None
    syncs: bool = True
    past: Any = None
    accelerator: Any = None
    own_backward: Callable[..., None] | None = None

    def use(self, how: Precision | Stepper, optimizer: torch.optim.Optimizer | None) -> None:
        """Use the calls of a run's stepper or, between runs, of the precision."""
        self.backward, self.autocast, self.optimizer = how.backward, how.autocast, optimizer


def has_own_steps(optimizer: Any) -> bool:
    """Return whether an optimizer takes the calls of a step over: its `assemble` returns a `Stepper`.

    With `stepping(step, weighing)` it also takes over the training step, and weighs its losses.
    """
    return hasattr(optimizer, "assemble")


@torch.no_grad()
def average_gradients(parameters: Sequence[torch.Tensor], strategy: Strategy) -> None:
    """Average gradients that no wrapper of the model averages, over all processes. Collective; mutates them.

    A process whose batch did not use a parameter has no gradient for it. If no process used it, it keeps none.
    """
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        same_dtype = [parameter for parameter in parameters if parameter.dtype == dtype]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in same_dtype]
        flags = parts[0].new_tensor([float(p.grad is not None) for p in same_dtype])
        sums = strategy.reduce(torch.cat([flags, *(part.reshape(-1) for part in parts)]), "mean")
        means = torch.split(sums[len(flags) :], [p.numel() for p in same_dtype])
        for number, (parameter, mean) in enumerate(zip(same_dtype, means, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(mean.view_as(parameter))
            elif sums[number] > 0:
                parameter.grad = mean.view_as(parameter).to(parameter.device, copy=True)
