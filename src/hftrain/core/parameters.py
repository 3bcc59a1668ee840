"""Parameters that ZeRO-3 has split: they are empty and keep their full shape in an attribute."""

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
