"""Load an optimizer's state as it was saved."""

from __future__ import annotations

from typing import Any

import torch


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
        own = optimizer.state.get(parameter, {})
        for name, saved in state["state"].get(key, {}).items():
            loaded = own.get(name)
            is_cast = isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor)
            if is_cast and loaded.dtype == parameter.dtype != saved.dtype:
                own[name] = torch.empty_like(loaded, dtype=saved.dtype).copy_(saved)
