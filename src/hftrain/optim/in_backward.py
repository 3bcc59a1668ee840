"""Optimizers that update during the backward pass, so that the gradients of the whole model never exist at once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class UpdatesInBackward(Optimizer):
    """What the step asks of such an optimizer; its own ``step()`` does what is then left to do.

    Attributes:
        clips: Whether it can clip by the norm of all gradients.
        takes_ranks: Whether it also works the usual way, by gradients that several processes have averaged.
    """

    clips = False
    takes_ranks = False

    def update_in_backward(
        self, loss: torch.Tensor, *, backward: Callable[[torch.Tensor], None], max_norm: float
    ) -> None:
        """Compute gradients and update the parameters with them, one after the other. Mutates the parameters.

        Args:
            max_norm: The largest norm of all gradients together; 0 turns clipping off.
        """
        raise NotImplementedError

    def last_norm(self) -> torch.Tensor | None:
        """Return the norm of the last gradients before they were clipped, None if nobody computed it."""
        return None


class LayerWise(UpdatesInBackward):
    """Step each parameter as soon as its gradient is complete, then drop the gradient.

    To be mixed in before an optimizer's class whose parameters do not depend on each other. It is one optimizer: its
    groups follow the schedule, and its state is saved and restored like any other's.

    Source: the documented ``..._layerwise`` optimizers.
    """

    _is_updating = False
    # Each device of a model spread over several has a backward thread of its own.
    _lock = threading.Lock()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and wait for the gradients of its parameters."""
        super().add_param_group(param_group)
        number, this = len(self.param_groups) - 1, weakref.ref(self)

        def update(parameter: torch.Tensor) -> None:
            # Weak, and idle outside of `update_in_backward`: a parameter may outlive its optimizer.
            optimizer = this()
            if optimizer is not None and optimizer._is_updating:
                optimizer._update(number, parameter)

        for parameter in self.param_groups[number]["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(update)

    def update_in_backward(
        self, loss: torch.Tensor, *, backward: Callable[[torch.Tensor], None], max_norm: float
    ) -> None:
        """Run the backward pass, during which each parameter is stepped; `max_norm` has no effect."""
        self._is_updating = True
        try:
            backward(loss)
        finally:
            self._is_updating = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the backward pass has stepped every parameter."""

    def _update(self, number: int, parameter: torch.Tensor) -> None:
        with self._lock:
            groups = self.param_groups
            self.param_groups = [{**groups[number], "params": [parameter]}]
            try:
                super().step()
            finally:
                self.param_groups = groups
        parameter.grad = None
