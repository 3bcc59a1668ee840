"""Whether one fused torch kernel can replace the loop over the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from hftrain.core.errors import ConfigError
from hftrain.core.parameters import local_part

_FUSED = (Adam, AdamW, SGD, Adagrad)
_VECTORISED = 256  # elements that a kernel does not step one by one
_GRAD, _IS_CONTIGUOUS = attrgetter("grad"), torch.Tensor.is_contiguous


def can_fuse(
    cls: type[Optimizer], settings: Mapping[str, Any], model: nn.Module, parameters: Iterable[torch.Tensor]
) -> bool:
    """Return whether ``fused=True`` gives the same updates, up to rounding, and the user has not chosen otherwise.

    To be set in the parameter groups: as an argument of the class it would also hand the unscaling of fp16 to the
    kernel, which fails with the scaler of FSDP.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> can_fuse(torch.optim.AdamW, {"lr": 0.1}, model, model.parameters())
        True
    """
    # With momentum, torch's fused SGD fails if a parameter gets its first gradient later than another parameter.
    has_chosen = any(settings.get(name) is not None for name in ("fused", "foreach"))
    is_unfit = has_chosen or bool(settings.get("momentum") or settings.get("differentiable"))
    if cls not in _FUSED or is_unfit or any(getattr(module, "sparse", False) is True for module in model.modules()):
        return False
    parameters = list(parameters)
    kinds = {(type(p), p.dtype, p.device, getattr(p, "device_mesh", None)): p for p in parameters}
    try:
        # The kernels read the memory of parameter, gradient and moments in parallel and ignore strides.
        if not all(local_part(p.detach()).is_contiguous() for p in parameters):
            return False
        # torch does not list the supported devices, dtypes and tensor types, so one parameter of each kind is stepped.
        samples = [parameter.detach().new_zeros(_VECTORISED) for parameter in kinds.values()]
        for (kind, *_), sample in zip(kinds, samples, strict=True):
            if kind not in (torch.Tensor, nn.Parameter, type(sample)):
                return False
        return _steps_all(cls, samples)
    except Exception:
        # The errors of a missing kernel differ by class, device and version.
        return False


def _steps_all(cls: type[Optimizer], samples: list[torch.Tensor]) -> bool:
    """Return whether one call steps every element: torch's SGD leaves those of 16 bits unchanged on a CPU."""
    for sample in samples:
        sample.grad = torch.ones_like(sample)
    cls(samples, lr=1.0, fused=True).step()  # type: ignore[call-arg]
    return all(bool(local_part(sample).all()) for sample in samples)


def fit_gradients(optimizer: Optimizer, *_: Any, is_chosen: bool = False) -> None:
    """Before a step, give gradients the strides that the kernels need; groups that do not fit use torch's loop.

    Such groups have sparse gradients, or a parameter that became channels_last, for example. If the user has
    chosen ``fused=True``, sparse ones are left to torch's error, and moments are laid out like the parameter.

    Gradients from autograd fit; gradients assigned in a training step or made by sparse functions may not.
    """
    for group in optimizer.param_groups:
        if group.get("fused") and not _are_all_contiguous(group["params"]):
            _fit_group(group, optimizer.state, may_unfuse=not is_chosen)


def fit_moments(optimizer: Optimizer) -> None:
    """After a load, give moments the strides of their parameters; they may differ from those in the checkpoint."""
    for parameter, state in optimizer.state.items():
        _fit_state(parameter, state)


def _are_all_contiguous(parameters: list[torch.Tensor]) -> bool:
    """Return whether all gradients are contiguous, as in nearly all runs; one C call, because it runs at every step."""
    try:
        return all(map(_IS_CONTIGUOUS, map(_GRAD, parameters))) and all(map(_IS_CONTIGUOUS, parameters))
    except (TypeError, RuntimeError):  # a parameter without a gradient, a sparse gradient
        return False


def _fit_group(group: dict[str, Any], states: Mapping[torch.Tensor, Any], *, may_unfuse: bool) -> None:
    """Give the gradients the layout that the kernel reads, or leave the group to torch's loop."""
    for parameter in group["params"]:
        grad = parameter.grad
        if grad is None:
            continue
        if may_unfuse and (grad.is_sparse or not parameter.is_contiguous()):
            group["fused"] = None
            return
        if grad.is_sparse:
            return
        parameter.grad = _with_strides_of(parameter, grad)
        if parameter in states:
            _fit_state(parameter, states[parameter])


def _fit_state(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            state[name] = _with_strides_of(parameter, value)


def _with_strides_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a parameter's strides; unchanged if it already has them."""
    if (value.is_contiguous() and parameter.is_contiguous()) or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def check_fusible(cls: type[Optimizer], parameters: Iterable[torch.Tensor]) -> None:
    """Refuse ``fused=True`` if torch's kernels would silently update other elements than those of the parameter.

    Raises:
        ConfigError: A parameter has gaps in memory: it is a slice of a larger tensor, or expanded. Or the kernel
            leaves parameters of a dtype as they are.
    """
    for parameter in parameters:
        if cls is SGD and parameter.is_cpu and not _steps_all(cls, [torch.zeros(_VECTORISED, dtype=parameter.dtype)]):
            raise ConfigError(
                f"Cannot use fused=True with parameters of {parameter.dtype}.",
                "torch's fused SGD leaves them unchanged on a CPU.",
                "Leave fused out.",
            )
        parameter = local_part(parameter.detach())
        # A tensor without gaps keeps its strides here; the moments get the same strides.
        if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
            raise ConfigError(
                f"Cannot use fused=True with a parameter of shape {tuple(parameter.shape)}.",
                f"It is not dense in memory (strides {parameter.stride()}), and torch's fused kernels ignore that.",
                "Leave fused out, or make the parameter contiguous.",
            )
