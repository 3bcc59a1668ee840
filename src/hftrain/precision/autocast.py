"""Mixed precision: float32 parameters, half-precision operations where they are safe."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hftrain.core.errors import ConfigError
from hftrain.core.log import warn_once
from hftrain.core.types import PrecisionPolicy
from hftrain.precision.base import Precision, ScalerFactory


class AutocastPrecision(Precision):
    """Cast operations one by one to bfloat16 with `torch.autocast`.

    Args:
        matmul: The arithmetic of the remaining float32 matrix products; see `FullPrecision`.

    Source: the documented `bf16`.
    """

    name = "bf16"
    dtype = torch.bfloat16
    loss_scaling = False

    def __init__(self, *, matmul: str | None = None) -> None:
        super().__init__(
            PrecisionPolicy(
                name=self.name,
                param_dtype=torch.float32,
                compute_dtype=self.dtype,
                reduce_dtype=torch.float32,
                loss_scaling=self.loss_scaling,
                autocast=True,
                matmul=matmul,
            )
        )
        self._device_type = ""

    def prepare(self, device: torch.device, scaler_factory: ScalerFactory) -> None:
        self._device_type = device.type
        self._context = self._new_context()

    def autocast(self) -> AbstractContextManager[Any]:
        # An autocast context stores a single previous state: it can be reused but not nested inside itself.
        return self._new_context() if torch.is_autocast_enabled(self._device_type) else self._context

    def _new_context(self) -> torch.autocast:
        return torch.autocast(self._device_type, dtype=self.policy.compute_dtype)


class ScaledPrecision(AutocastPrecision):
    """Cast operations to float16 and scale the loss, so that small gradients do not underflow.

    A step whose gradients overflow is skipped and the scale is lowered. Whether that happened is read from the device,
    once per step.

    Args:
        matmul: The arithmetic of the remaining float32 matrix products; see `FullPrecision`.

    Source: the documented `fp16`; Micikevicius et al., Mixed Precision Training, 2018.
    """

    name = "fp16"
    dtype = torch.float16
    loss_scaling = True

    _scaler: GradScaler
    _scale: float
    # The updates since the scale has changed: after so many in a row it grows.
    _num_in_a_row: int
    _num_skipped: int
    _unscaled: set[int]
    # In the current step: whether an optimizer was not called, or was and may have skipped its update itself.
    _is_skipped: bool
    _is_unsure: bool

    def prepare(self, device: torch.device, scaler_factory: ScalerFactory) -> None:
        super().prepare(device, scaler_factory)
        self._scaler = scaler_factory(device)
        self._scale = self._scaler.get_scale()
        self._num_skipped = self._num_in_a_row = 0
        self._unscaled = set()
        self._is_skipped = self._is_unsure = False

    def convert(self, model: nn.Module) -> nn.Module:
        """Return the model unchanged.

        Raises:
            ConfigError: The model has trainable float16 parameters, whose gradients cannot be unscaled.
        """
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype == torch.float16:
                raise ConfigError(
                    f"Cannot use precision={self.policy.name!r}.",
                    f"Parameter {name!r} is float16 itself; mixed precision updates float32 parameters.",
                    "Load the model in float32 (`torch_dtype=torch.float32`), or freeze that parameter.",
                )
        return model

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self._scaler.scale(loss).backward(**options)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._unscaled:
            self._unscaled.add(id(optimizer))
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        self.apply(optimizer)
        return self.update_scale()

    def apply(self, optimizer: Optimizer) -> None:
        # GradScaler does not report skipped steps: it does not call the optimizer then.
        optimizer_calls: list[Any] = []
        hook = register_optimizer_step_post_hook(lambda *call: optimizer_calls.append(call))
        try:
            self._scaler.step(optimizer)
        finally:
            hook.remove()
        # One of torch's that was made with fused=True skips its update itself, and so may one of another package.
        is_plain = type(optimizer).__module__.startswith("torch.optim.") and not optimizer.defaults.get("fused")
        self._is_skipped |= not optimizer_calls
        self._is_unsure |= not is_plain

    def update_scale(self) -> bool:
        is_skipped, last_scale = self._is_skipped, self._scale
        self._scaler.update()
        self._unscaled.clear()
        self._num_in_a_row += 1
        # Otherwise the scale is what it was, and reading it would be a second wait.
        if is_skipped or self._is_unsure or self._num_in_a_row >= self._scaler.get_growth_interval():
            self._scale = self._scaler.get_scale()
            # Only an overflow lowers the scale. One of 0 cannot get lower, and gradients divided by it are not finite.
            is_skipped = is_skipped or self._scale < last_scale or not self._scale
            self._num_in_a_row = 0 if self._scale != last_scale else self._num_in_a_row
        self._is_skipped = self._is_unsure = False
        self._num_skipped += is_skipped
        if is_skipped and self._scale < 1:
            warn_once(
                "fp16: gradients overflow although the loss scale has come down to 1, so steps are skipped in a row. "
                "The loss or the model's own numbers are NaN or too large for float16: use bf16, or look for the first "
                "of them with debug='underflow_overflow'."
            )
        return not is_skipped

    def logs(self) -> dict[str, float]:
        """Return the loss scale and the number of skipped steps so far."""
        return {"loss_scale": self._scale, "skipped_steps": self._num_skipped}

    def state_dict(self) -> dict[str, Any]:
        return {**self._scaler.state_dict(), "num_skipped": self._num_skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scaler; an empty state, saved by a run without a scaler, changes nothing.

        Raises:
            ValueError: A value is outside the range that a scaler can reach.
        """
        if state:
            counts = {name: state.get(name, 0) for name in ("growth_interval", "_growth_tracker", "num_skipped")}
            factors = {name: state.get(name) for name in ("scale", "growth_factor", "backoff_factor")}
            is_fit = all(type(each) is int and 0 <= each < 1 << 31 for each in counts.values())
            if not is_fit or not all(isinstance(each, float) and 0 <= each < math.inf for each in factors.values()):
                raise ValueError(f"The state of a gradient scaler cannot be {counts} with {factors}.")
            self._scaler.load_state_dict(state)
            self._scale = self._scaler.get_scale()
            self._num_skipped = state.get("num_skipped", 0)
            self._num_in_a_row = counts["_growth_tracker"]
