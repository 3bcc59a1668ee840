"""What others keep in models: the shapes of parameters that ZeRO-3 has split and emptied, and private attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the full shape of a parameter, even if ZeRO-3 has split it."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def is_split_by_zero(parameter: Any) -> bool:
    """Return whether ZeRO-3 has split a parameter."""
    return hasattr(parameter, "ds_id")


def is_partitioned(model: nn.Module) -> bool:
    """Return whether ZeRO-3 has split a model's parameters."""
    return any(map(is_split_by_zero, model.parameters()))


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a result of `state_dict`, tensors in the dtypes in which they were saved; mutates the optimizer.

    torch casts them to the dtype of their parameter. That rounds averages that an optimizer keeps in float32 beside
    16-bit parameters, as Adafactor does.
    """
    optimizer.load_state_dict(state)
    if not {"state", "param_groups"} <= state.keys():
        return  # a format of its own
    keys = [key for group in state["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, parameter in zip(keys, parameters, strict=True):
        entry = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(key, {}).items():
            current = entry.get(name)
            is_cast = isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor)
            if is_cast and current.dtype == parameter.dtype != value.dtype:
                entry[name] = torch.empty_like(current, dtype=value.dtype).copy_(value)


# -- what models hold under private names, which have no public way; each stands here only ----------------------------


def layer_hint(model: Any) -> list[str]:
    """Return the class names of a model's repeated layers, by the hint of transformers' models; empty without one."""
    return list(getattr(model, "_no_split_modules", None) or ())


def attention_of(model: Any, default: str = "") -> str:
    """Return how a transformers model computes attention (``"sdpa"``), or the default for another model."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", default))
