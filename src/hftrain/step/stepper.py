"""The calls of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch


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
