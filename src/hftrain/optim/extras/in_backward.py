"""Optimizers that update during the backward pass, so that the gradients of the whole model never exist at once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hftrain.core.preserve import temporarily


class UpdatesInBackward(Optimizer):
    """The interface the step uses; the optimizer's own ``step()`` does what remains.

    Attributes:
        clips: Whether it can clip by the norm of all gradients.
        takes_ranks: Whether it can also step in the usual way, on gradients averaged over ranks.
    """

    clips = False
    takes_ranks = False

    def update_in_backward(
        self, loss: torch.Tensor, *, backward: Callable[[torch.Tensor], None], max_norm: float
    ) -> None:
        """Compute the gradients and update each parameter as its gradient is ready. Mutates the parameters.

        Args:
            max_norm: The largest norm of all gradients together; 0 turns clipping off.
        """
        raise NotImplementedError

    def last_norm(self) -> torch.Tensor | None:
        """Return the norm of the last gradients before clipping; None if it was not computed."""
        return None


class LayerWise(UpdatesInBackward):
    """Step each parameter as soon as its gradient is complete, then drop the gradient.

    A mix-in for optimizer classes whose parameters are updated independently. It remains one optimizer: its
    groups follow the schedule, and its state is saved and restored like any other's.

    Source: the documented ``..._layerwise`` optimizers.
    """

    is_updating = False
    # Each device of a model spread over several has a backward thread of its own.
    _lock = threading.Lock()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and register hooks on its parameters' gradients."""
        super().add_param_group(param_group)
        number, this = len(self.param_groups) - 1, weakref.ref(self)

        def update(parameter: torch.Tensor) -> None:
            # A weak reference that does nothing outside `update_in_backward`: a parameter may outlive its optimizer.
            optimizer = this()
            if optimizer is not None and optimizer.is_updating:
                optimizer._update(number, parameter)

        for parameter in self.param_groups[number]["params"]:
            if parameter.is_floating_point():
                # torch only hooks parameters that require a gradient; a frozen one may be unfrozen later.
                is_trained = parameter.requires_grad
                parameter.requires_grad_().register_post_accumulate_grad_hook(update)
                parameter.requires_grad_(is_trained)

    def update_in_backward(
        self, loss: torch.Tensor, *, backward: Callable[[torch.Tensor], None], max_norm: float
    ) -> None:
        """Run the backward pass and step each parameter in it; `max_norm` has no effect."""
        with temporarily(self, is_updating=True):
            backward(loss)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the backward pass has stepped every parameter."""

    def _update(self, number: int, parameter: torch.Tensor) -> None:
        with self._lock:
            group = {**self.param_groups[number], "params": [parameter]}
            with temporarily(self, param_groups=[group]):
                super().step()
        parameter.grad = None
