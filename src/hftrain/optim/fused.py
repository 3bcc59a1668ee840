"""Whether one kernel of torch can update all parameters, in place of a loop over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

_FUSED = (Adam, AdamW, SGD, Adagrad)


def can_fuse(
    cls: type[Optimizer], settings: Mapping[str, Any], model: nn.Module, parameters: Iterable[torch.Tensor]
) -> bool:
    """Tell whether ``fused=True`` gives the same updates, up to rounding, and nobody has chosen otherwise.

    To be set in the parameter groups: as an argument of the class it would also hand the unscaling of fp16 to the
    kernel, which fails with the scaler of FSDP.

    Args:
        cls: The optimizer's class.
        settings: Its keyword arguments.
        model: The parameters' model.
        parameters: What is trained, on its device.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> can_fuse(torch.optim.AdamW, {"lr": 0.1}, model, model.parameters())
        True
    """
    # With momentum, torch's fused SGD fails if a parameter gets its first gradient after another one did.
    has_chosen = any(settings.get(name) is not None for name in ("fused", "foreach"))
    is_unfit = has_chosen or bool(settings.get("momentum") or settings.get("differentiable"))
    if cls not in _FUSED or is_unfit or any(getattr(module, "sparse", False) is True for module in model.modules()):
        return False
    parameters = list(parameters)
    kinds = {(type(p), p.dtype, p.device, getattr(p, "device_mesh", None)): p for p in parameters}
    try:
        # The kernels walk through the memory of parameter, gradient and moments side by side, whatever their strides.
        if not all(getattr(p, "_local_tensor", p).is_contiguous() for p in parameters):
            return False
        # torch documents no list of devices, dtypes and kinds of tensor, so one parameter of each kind takes a step.
        stand_ins = [parameter.detach().new_zeros(2) for parameter in kinds.values()]
        for (kind, *_), stand_in in zip(kinds, stand_ins, strict=True):
            if kind not in (torch.Tensor, nn.Parameter, type(stand_in)):
                return False
            stand_in.grad = torch.zeros_like(stand_in)
        cls(stand_ins, fused=True).step()
    except Exception:
        # The errors of a missing kernel differ by class, device and version.
        return False
    return True


def fit_gradients(optimizer: Optimizer, *_: Any) -> None:
    """Before a step, lay gradients out as the kernels read them; leave groups with sparse ones to torch's loop.

    autograd lays them out itself; those that a training step assigns, and of sparse functions, can be otherwise.
    """
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            if grad.is_sparse:
                group["fused"] = None
                break
            if not grad.is_contiguous():
                parameter.grad = grad.contiguous()
