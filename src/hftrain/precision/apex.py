"""NVIDIA Apex's `amp`, torch's own mixed precision before there was one."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hftrain.core.errors import MissingDependencyError, explain
from hftrain.core.types import PrecisionPolicy
from hftrain.precision.base import Precision

_HALF = ("O2", "O3")


class ApexPrecision(Precision):
    """Train with `apex.amp` at one of its optimization levels.

    ``O0`` is float32, ``O1`` casts operations one by one, ``O2`` keeps float32 master weights of a float16 model and
    ``O3`` is float16 throughout. A step whose gradients overflow is skipped. Clipping sees the master weights, which
    are what Apex leaves in the optimizer.

    Args:
        level: ``"O0"`` to ``"O3"``.

    Source: the documented `half_precision_backend="apex"` and `fp16_opt_level`.
    """

    def __init__(self, *, level: str) -> None:
        half, full = torch.float16, torch.float32
        super().__init__(
            PrecisionPolicy(
                name=f"apex_{level.lower()}",
                param_dtype=half if level in _HALF else full,
                compute_dtype=full if level == "O0" else half,
                reduce_dtype=half if level in _HALF else full,
            )
        )
        self.level = level
        self._amp: Any = None
        self._optimizer: Optimizer
        self._last_scale = 1.0

    def check_available(self) -> None:
        """Raise unless Apex with its `amp` is installed; nothing of it is imported but the package itself.

        Raises:
            MissingDependencyError: It is not.
        """
        is_here = importlib.util.find_spec("apex") is not None
        if not is_here or importlib.util.find_spec("apex.amp") is None:
            reason = "The installed apex has no amp: it was removed." if is_here else "Apex is not installed."
            raise MissingDependencyError(
                explain(
                    f"precision={self.policy.name!r} was asked for.",
                    reason,
                    "Use its successor, torch's own mixed precision: precision='fp16' (fp16=True with "
                    "half_precision_backend='auto') in place of O1 and O2, 'fp16_true' of O3, 'fp32' of O0.",
                )
            )

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        """Hand both to Apex. Mutates them."""
        from apex import amp

        self._amp = amp
        _, self._optimizer = amp.initialize(model, optimizer, opt_level=self.level)
        self._last_scale = self._scale()
        return self._optimizer

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        with self._amp.scale_loss(loss, self._optimizer) as scaled:
            scaled.backward(**options)

    def step(self, optimizer: Optimizer) -> bool:
        # Apex skips inside the optimizer, and tells by a scale that its backward lowered.
        optimizer.step()
        before, self._last_scale = self._last_scale, self._scale()
        return self._last_scale >= before

    def logs(self) -> dict[str, float]:
        return {"loss_scale": self._last_scale}

    def _scale(self) -> float:
        return float(self._amp.state_dict()["loss_scaler0"]["loss_scale"])

    def state_dict(self) -> dict[str, Any]:
        return dict(self._amp.state_dict()) if self._amp is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._amp.load_state_dict(state)
            self._last_scale = self._scale()
