"""APOLLO: learning rates per channel or tensor, estimated in a low-rank space."""

from __future__ import annotations

from typing import Any

from torch import nn

from hftrain.optim.low_rank import low_rank_class
from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, load

_LOW_RANK = {
    "rank": 128,
    "proj": "random",
    "scale_type": "channel",
    "update_proj_gap": 200,
    "scale": 1.0,
    "proj_type": "std",
}
_CHOICES = {
    "proj": ("random", "svd"),
    "scale_type": ("channel", "tensor"),
    "proj_type": ("std", "reverse_std", "right", "left"),
}


def adamw(config: OptimizerConfig, model: nn.Module | None, *, is_layerwise: bool) -> OptimizerClass:
    """Return APOLLO's AdamW. Source: Zhu et al., 2024, arXiv 2412.05270."""
    cls = load("apollo_torch:APOLLOAdamW", "apollo-torch", config, extra="apollo")
    settings: dict[str, Any] = {"low_rank": _LOW_RANK, "choices": _CHOICES, "betas": config.betas, "eps": config.eps}
    made, given = low_rank_class(cls, config, model, is_layerwise=is_layerwise, **settings)
    made.make_projector = cls._initialize_projector  # type: ignore[attr-defined]
    return made, given
