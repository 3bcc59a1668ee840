"""The base class of precisions, which does not change torch's arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError
from hftrain.core.log import warn_once
from hftrain.core.signatures import Shown
from hftrain.core.types import PrecisionPolicy

ScalerFactory = Callable[[torch.device], GradScaler]


class Precision(Shown):
    """Base class of precisions: chooses dtypes, autocast and loss scaling.

    Subclasses override `prepare` and `autocast`, and for loss scaling also `backward`, `unscale`, `apply` and
    `update_scale`.

    Args:
        policy: The settings of this precision that strategies may read.

    Raises:
        ConfigError: `policy.matmul` is not a value of `PrecisionPolicy`.
    """

    def __init__(self, policy: PrecisionPolicy) -> None:
        if policy.matmul not in (None, "highest", "high"):
            raise ConfigError(
                f"Cannot use matmul={policy.matmul!r}.",
                "Float32 matrix products run in float32 or in TF32.",
                "Use 'highest' (float32), 'high' (TF32) or None (torch's own setting).",
            )
        self.policy = policy
        self._device: torch.device | None = None
        self._context: AbstractContextManager[Any] = nullcontext()
        self._restore_matmul: Callable[[], None] | None = None

    def check_available(self) -> None:
        """Raise `MissingDependencyError` if a required package is not installed; touches no device."""

    def open(self, device: torch.device, scaler_factory: ScalerFactory) -> None:
        """Prepare for a device and set the global flags; opening again on the same device changes nothing.

        Mutates torch's TF32 flags if the policy sets `matmul`; `close` restores them.

        Args:
            scaler_factory: Makes the strategy's gradient scaler; called only if the loss is scaled.

        Raises:
            ConfigError: It is already open on another device, or the TF32 flags cannot be read.
        """
        if self._device == device:
            return
        if self._device is not None:
            raise ConfigError(
                f"Cannot open precision={self.policy.name!r} on {str(device)!r}.",
                f"It is open on {str(self._device)!r}.",
                "Call close() first, or use a second precision object.",
            )
        self.prepare(device, scaler_factory)
        if self.policy.matmul is not None:
            self._restore_matmul = set_matmul(self.policy.matmul)
        self._device = device

    def prepare(self, device: torch.device, scaler_factory: ScalerFactory) -> None:
        """Build what a run on `device` needs; called once by `open`."""

    def close(self) -> None:
        """Restore the global flags; safe to call twice."""
        if self._restore_matmul is not None:
            self._restore_matmul()
        self._restore_matmul = self._device = None

    def convert(self, model: nn.Module) -> nn.Module:
        """Return the model with its parameters in this precision's dtype; may mutate it."""
        return model

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to step, given one made for the converted model; may mutate both."""
        return optimizer

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context to run a forward pass in."""
        return self._context

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Accumulate the gradients of a loss; `options` are those of `torch.Tensor.backward`."""
        loss.backward(**options)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the optimizer's gradients; a second call in the same step changes nothing."""

    def step(self, optimizer: Optimizer) -> bool:
        """Update the parameters; return False if the step was skipped because gradients overflowed."""
        optimizer.step()
        return True

    def apply(self, optimizer: Optimizer) -> None:
        """Update the parameters of one of several optimizers, unless its gradients overflowed."""
        optimizer.step()

    def update_scale(self) -> bool:
        """Adjust the scale of the loss after `apply`; return False if an update was skipped since the last call."""
        return True

    def logs(self) -> dict[str, float]:
        """Return the values to report with the training loss; does not synchronise."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state for resuming; empty without a scaler."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; without a scaler, warn once that a saved scaler's state is ignored."""
        if state:
            warn_once(f"The saved gradient scaler has no use with precision={self.policy.name!r} and was left out.")


def set_matmul(matmul: str) -> Callable[[], None]:
    """Set the arithmetic of float32 matrix products and cuDNN convolutions; return a function that restores it.

    Args:
        matmul: ``"high"`` for TF32, ``"highest"`` for float32.

    Raises:
        ConfigError: The flags were set through torch's newer `fp32_precision` interface, which hides them here.
    """
    # torch.compile still reads these flags and fails if only the newer `fp32_precision` was set
    # (pytorch issue 166387). Setting these keeps both interfaces readable. Switch once that issue is closed.
    try:
        with warnings.catch_warnings():
            # torch 2.9 recommends the newer flags once per process; 2.13 no longer does.
            warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)
            old_settings = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError as error:
        raise ConfigError(
            f"Cannot use matmul={matmul!r}.",
            "This process has set torch's `fp32_precision` flags itself, and torch refuses to mix the two.",
            "Remove those settings, or let them control TF32 and set neither `matmul` nor 'tf32' here.",
        ) from error
    _apply(matmul, matmul == "high")
    return lambda: _apply(*old_settings)


def _apply(matmul: str, allow_tf32: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = allow_tf32


class FullPrecision(Precision):
    """Run every operation in the parameters' own dtype.

    Args:
        matmul: ``"highest"`` or ``"high"`` (TF32); None keeps torch's setting.

    Source: the documented `tf32` (True is ``"high"``, False is ``"highest"``).

    Example:
        >>> FullPrecision(matmul="high").policy.name
        'tf32'
    """

    def __init__(self, *, matmul: str | None = None) -> None:
        super().__init__(
            PrecisionPolicy(
                name="tf32" if matmul == "high" else "fp32",
                param_dtype=torch.float32,
                compute_dtype=torch.float32,
                reduce_dtype=torch.float32,
                matmul=matmul,
            )
        )
