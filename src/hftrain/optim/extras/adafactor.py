"""Adafactor with all options of its paper, and the schedule that reports its step sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hftrain.core.errors import ConfigError
from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, read_options


def adafactor(config: OptimizerConfig, model: nn.Module | None) -> OptimizerClass:
    """Return `Adafactor` with the documented settings: an external learning rate, no scaling by the parameter."""
    options = read_options(config, {"clip_threshold": float, "decay_rate": float, "beta1": float | None})
    return Adafactor, {"lr": config.learning_rate, "scale_parameter": False, "relative_step": False, **options}


class Adafactor(Optimizer):
    """Adafactor: Adam with factored second moments (row and column means) and optional relative step sizes.

    Args:
        params: Parameters, or groups of them.
        lr: The learning rate; None with `relative_step`.
        eps: The term added to squared gradients, and the smallest scale of a parameter.
        clip_threshold: The largest root mean square of an update.
        decay_rate: The second moments' decay at step t is 1 - t ** decay_rate.
        beta1: The first moments' decay; None for no first moments.
        weight_decay: Decay, times the step's size.
        scale_parameter: Scale the step by the parameter's root mean square.
        relative_step: Take 1 / sqrt(t), at most 0.01, in place of `lr`.
        warmup_init: At most 1e-6 t instead of 0.01.

    Raises:
        ConfigError: `lr` is given with `relative_step`, or `warmup_init` without.

    Source: Shazeer and Stern, 2018, arXiv 1804.04235; the documented `Adafactor`.

    Example:
        >>> Adafactor([torch.nn.Parameter(torch.ones(2))], lr=1e-3, relative_step=False).defaults["lr"]
        0.001
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        if lr is not None and relative_step:
            reason, remedy = "relative_step=True chooses the size of each step.", "Set relative_step=False, or lr=None."
            raise ConfigError("Cannot use Adafactor's lr:", reason, remedy, lr=lr)
        if warmup_init and not relative_step:
            reason = "it only applies to relative_step=True."
            raise ConfigError("Cannot use Adafactor's warmup_init=True:", reason, "Leave it out.")
        defaults: dict[str, Any] = {"lr": lr, "eps": eps, "beta1": beta1, "weight_decay": weight_decay}
        defaults |= {"clip_threshold": clip_threshold, "decay_rate": decay_rate, "scale_parameter": scale_parameter}
        super().__init__(params, {**defaults, "relative_step": relative_step, "warmup_init": warmup_init})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, self.state[parameter], group)
        return loss


class AdafactorSchedule(LambdaLR):
    """Schedule that reports the relative step sizes of an `Adafactor`; it changes nothing.

    Args:
        optimizer: The optimizer.
        initial_lr: The rate to report before the first step.

    Source: the documented `AdafactorSchedule`.
    """

    def __init__(self, optimizer: Optimizer, initial_lr: float = 0.0) -> None:
        # torch's schedules need an initial rate, and `lr` is None with relative step sizes.
        for group in optimizer.param_groups:
            group["initial_lr"] = initial_lr
        super().__init__(optimizer, _Constant(initial_lr))
        for group in optimizer.param_groups:
            del group["initial_lr"]

    def get_lr(self) -> list[Any]:
        """Return the size of each group's last step, or `initial_lr` before the first."""
        optimizer: Any = self.optimizer
        firsts = [(group, group["params"][0]) for group in optimizer.param_groups]
        found = [
            step_size(group, optimizer.state[first])
            for group, first in firsts
            if first.grad is not None and optimizer.state.get(first)
        ]
        return found or self.base_lrs


def get_adafactor_schedule(optimizer: Optimizer, initial_lr: float = 0.0) -> AdafactorSchedule:
    """Return an `AdafactorSchedule`. Source: the documented `get_adafactor_schedule`."""
    return AdafactorSchedule(optimizer, initial_lr)


class _Constant:
    """A constant; an object and not a lambda, so that the schedule's state holds it as plain data."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, step: int) -> float:
        return self.value


def step_size(group: dict[str, Any], state: dict[str, Any]) -> Any:
    """Return the step size of a parameter's last update, without the gradient."""
    size = group["lr"]
    if group["relative_step"]:
        size = min(1e-6 * state["step"] if group["warmup_init"] else 1e-2, state["step"] ** -0.5)
    return max(group["eps"][1], state["RMS"]) * size if group["scale_parameter"] else size


def _update(parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if parameter.grad is None or parameter.grad.is_sparse:
        reason = "it keeps means of rows and columns."
        raise ConfigError("Cannot use Adafactor with sparse gradients:", reason, "Use optim='sgd'.")
    is_half = parameter.dtype in (torch.float16, torch.bfloat16)
    gradient = parameter.grad.float() if parameter.grad.dtype in (torch.float16, torch.bfloat16) else parameter.grad
    weights = parameter.float() if is_half else parameter
    is_factored = gradient.ndim >= 2
    if not state:
        state["step"] = 0
        if group["beta1"] is not None:
            state["exp_avg"] = torch.zeros_like(gradient)
        if is_factored:
            state["exp_avg_sq_row"] = gradient.new_zeros(gradient.shape[:-1])
            state["exp_avg_sq_col"] = gradient.new_zeros(gradient.shape[:-2] + gradient.shape[-1:])
        else:
            state["exp_avg_sq"] = torch.zeros_like(gradient)
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"):
        if name in state:  # a checkpoint may have held them in the parameter's dtype
            state[name] = _placed(state[name].to(gradient), gradient)
    state["step"] += 1
    state["RMS"] = _root_mean_square(weights)
    size = step_size(group, state)
    keep = 1.0 - state["step"] ** group["decay_rate"]
    squares = gradient**2 + group["eps"][0]
    if is_factored:
        rows = state["exp_avg_sq_row"].mul_(keep).add_(squares.mean(dim=-1), alpha=1.0 - keep)
        columns = state["exp_avg_sq_col"].mul_(keep).add_(squares.mean(dim=-2), alpha=1.0 - keep)
        by_row = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        update = torch.mul(by_row, columns.unsqueeze(-2).rsqrt()).mul_(gradient)
    else:
        update = state["exp_avg_sq"].mul_(keep).add_(squares, alpha=1.0 - keep).rsqrt().mul_(gradient)
    update.div_((_root_mean_square(update) / group["clip_threshold"]).clamp_(min=1.0)).mul_(size)
    if group["beta1"] is not None:
        update = state["exp_avg"].mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
    if group["weight_decay"]:
        weights.add_(weights * (-group["weight_decay"] * size))
    weights.sub_(update)
    if is_half:
        parameter.copy_(weights)


def _placed(mean: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a mean, which a checkpoint holds whole, as one that can be computed with a split gradient."""
    if isinstance(mean, DTensor) or not isinstance(gradient, DTensor):
        return mean
    mesh = gradient.device_mesh
    return DTensor.from_local(mean, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = tensor.norm(2)
    return norm / math.sqrt(tensor.numel())
