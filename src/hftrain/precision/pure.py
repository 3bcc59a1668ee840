"""One dtype for everything: parameters, operations and the optimizer's state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hftrain.core.errors import ConfigError
from hftrain.core.log import warn_once
from hftrain.core.tree import map_tensors
from hftrain.core.types import PrecisionPolicy
from hftrain.precision.base import Precision

_REMEDY = "Use precision='fp16' or 'bf16', which keep the weights in float32."


class PurePrecision(Precision):
    """Convert the model and its floating-point inputs to one dtype.

    Half precision needs half the memory of float32 but rounds small updates away. Prefer mixed precision if memory
    allows, and `bf16_true` to `fp16_true`, whose unscaled gradients underflow or overflow.

    Args:
        dtype: The dtype of parameters, operations and optimizer state.

    Example:
        >>> PurePrecision(name="bf16_true", dtype=torch.bfloat16).convert(nn.Linear(2, 1)).weight.dtype
        torch.bfloat16
    """

    def __init__(self, *, name: str, dtype: torch.dtype) -> None:
        super().__init__(PrecisionPolicy(name=name, param_dtype=dtype, compute_dtype=dtype, reduce_dtype=dtype))
        self._hooks: dict[nn.Module, RemovableHandle] = {}

    def convert(self, model: nn.Module) -> nn.Module:
        """Convert floating-point parameters and buffers, and inputs until `close`. Mutates the model."""
        if self._device is not None and model not in self._hooks:
            self._hooks[model] = model.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
        return model.to(self.policy.param_dtype)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer unchanged; warn if float16 cannot represent its state accurately.

        Raises:
            ConfigError: Its epsilon rounds to 0 in this dtype, so a zero gradient would give NaN.
        """
        groups = optimizer.param_groups
        for group in groups:
            epsilon = group.get("eps")
            if isinstance(epsilon, float) and epsilon and not torch.tensor(epsilon, dtype=self.policy.param_dtype):
                raise ConfigError(
                    f"Cannot use precision={self.policy.name!r} with {type(optimizer).__name__}.",
                    f"Its eps={epsilon} is 0 in {self.policy.param_dtype}, and dividing by it gives NaN.",
                    _REMEDY,
                )
        if self.policy.param_dtype == torch.float16 and any(isinstance(each.get("eps"), float) for each in groups):
            warn_once(
                f"{type(optimizer).__name__} keeps the squares of gradients in float16, where those of gradients below "
                f"2e-4 are 0: with precision={self.policy.name!r} it trains differently from float32, whatever its "
                f"eps. {_REMEDY}"
            )
        return optimizer

    def close(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        super().close()

    def _cast_inputs(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_tensors(args, self._cast), map_tensors(kwargs, self._cast)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.policy.compute_dtype) if tensor.is_floating_point() else tensor
