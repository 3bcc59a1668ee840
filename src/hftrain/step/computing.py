"""How steps compute at the moment: a run and an evaluation replace it for as long as they last."""

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
    """How steps compute at the moment.

    Attributes:
        backward: Runs backward on a loss.
        autocast: Makes the precision's casting context.
        input_dtype: What floating-point inputs are cast to; None leaves them as they are.
        optimizer: The run's; None while nothing is trained.
        syncs: Whether an update follows the micro-step that runs.
        past: What a recurrent model hands from step to step (`past_index`).
    """

    backward: Callable[..., None]
    autocast: Callable[[], AbstractContextManager[Any]]
    input_dtype: torch.dtype | None = None
    optimizer: torch.optim.Optimizer | None = None
    syncs: bool = True
    past: Any = None

    def use(self, how: Precision | Stepper, optimizer: torch.optim.Optimizer | None) -> None:
        """Compute as a run's stepper says, or, between runs, as the precision alone does."""
        self.backward, self.autocast, self.optimizer = how.backward, how.autocast, optimizer
