"""AdamW with configurable dtypes of its averages, and optional compensated summation, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError
from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, read_options

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


class AnyPrecisionAdamW(Optimizer):
    """AdamW with configurable dtypes of its averages.

    With `use_kahan_summation` a buffer collects the rounding errors of updates in the parameter's dtype, so
    that bfloat16 parameters learn from small updates.

    Source: the documented `adamw_anyprecision`; W. Kahan, 1965, "Further remarks on reducing truncation errors".
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        use_kahan_summation: bool = False,
        momentum_dtype: torch.dtype = torch.float32,
        variance_dtype: torch.dtype = torch.float32,
        compensation_buffer_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._dtypes = {"exp_avg": momentum_dtype, "exp_avg_sq": variance_dtype}
        if use_kahan_summation:
            self._dtypes["compensation"] = compensation_buffer_dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Update one parameter; with compensation, what rounding drops is added to its next update."""
        state, (beta1, beta2), grad = self.state[parameter], group["betas"], parameter.grad
        if not state:
            state["step"] = 0
            state.update({name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in self._dtypes.items()})
        state["step"] += 1
        average, squares = state["exp_avg"], state["exp_avg_sq"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        average.mul_(beta1).add_(grad, alpha=1 - beta1)
        squares.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        rate = -group["lr"] / (1 - beta1 ** state["step"])
        denominator = (squares.sqrt() / math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
        if "compensation" not in state:
            parameter.addcdiv_(average, denominator, value=rate)
            return
        compensation = state["compensation"].addcdiv_(average, denominator, value=rate)
        previous = parameter.clone()
        parameter.add_(compensation)
        compensation.add_(previous.sub_(parameter))


def adamw_anyprecision(config: OptimizerConfig, model: nn.Module | None) -> OptimizerClass:
    """Return `AnyPrecisionAdamW`; dtypes are written by name."""
    dtypes = dict.fromkeys(("momentum_dtype", "variance_dtype", "compensation_buffer_dtype"), str)
    options = read_options(config, {"use_kahan_summation": bool, **dtypes})
    for key, value in options.items():
        if key in dtypes:
            if value.removeprefix("torch.") not in _DTYPES:
                raise ConfigError(
                    f"Cannot use optim={config.name!r} with optim_args {key}={value}.",
                    "That names no dtype of floating point.",
                    f"Use one of {', '.join(_DTYPES)}.",
                    **{key: value},
                )
            options[key] = _DTYPES[value.removeprefix("torch.")]
    return AnyPrecisionAdamW, {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps, **options}
