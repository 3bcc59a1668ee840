"""The current settings of forward and backward passes, which a run or an evaluation replaces temporarily."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from hftrain.precision.base import Precision
from hftrain.step.stepper import Stepper


@dataclass(slots=True)
class Computing:
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
