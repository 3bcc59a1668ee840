"""transformers' Adafactor, also for sharded parameters."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, load, read_options


def adafactor(config: OptimizerConfig, model: nn.Module | None) -> OptimizerClass:
    """Return Adafactor with the documented settings: an external learning rate, no scaling by the parameter.

    Source: Shazeer and Stern, 2018, arXiv 1804.04235; the documented `Adafactor`.
    """
    cls = _with_sharded_means(load("transformers.optimization:Adafactor", "transformers", config, extra="transformers"))
    options = read_options(config, {"clip_threshold": float, "decay_rate": float, "beta1": float | None})
    return cls, {"lr": config.learning_rate, "scale_parameter": False, "relative_step": False, **options}


@cache
def _with_sharded_means(base: Any) -> Any:
    """Return Adafactor with means that fit a sharded gradient (`DTensor`); its own are plain tensors."""

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        self.register_step_pre_hook(_place_means)

    return type(base.__name__, (base,), {"__module__": base.__module__, "__init__": start})


def _place_means(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter.grad, DTensor):
                _place_state(optimizer.state[parameter], parameter.grad, has_mean=group["beta1"] is not None)


@torch.no_grad()
def _place_state(state: dict[str, Any], gradient: DTensor, *, has_mean: bool) -> None:
    """Begin the state of a sharded parameter, or place the means of a checkpoint, which holds them whole."""
    if not state:
        zeros: Any = torch.zeros_like(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        state.update({"step": 0, "RMS": 0}, **({"exp_avg": zeros} if has_mean else {}))
        if gradient.ndim >= 2:
            shape = gradient.shape
            state["exp_avg_sq_row"] = zeros.new_zeros(shape[:-1])
            state["exp_avg_sq_col"] = zeros.new_zeros(shape[:-2] + shape[-1:])
        else:
            state["exp_avg_sq"] = zeros.clone()
    mesh = gradient.device_mesh
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"):
        if name in state and not isinstance(state[name], DTensor):
            whole = state[name].to(gradient.device)
            state[name] = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
