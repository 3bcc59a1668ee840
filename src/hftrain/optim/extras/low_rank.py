"""GaLore and APOLLO: optimizers that project the gradients of linear modules to a low rank."""

from __future__ import annotations

from typing import Any

from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.optim.low_rank import low_rank_class
from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, check_cuda, load

_GALORE_CHOICES = {"proj_type": ("std", "reverse_std", "right", "left", "full")}
_GALORE = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}


def galore_adamw(config: OptimizerConfig, model: nn.Module | None, *, is_layerwise: bool) -> OptimizerClass:
    """Return GaLore's AdamW. Source: Zhao et al., 2024, arXiv 2403.03507."""
    cls = _load(":GaLoreAdamW", config)
    settings = {"betas": config.betas, "eps": config.eps, "no_deprecation_warning": True}
    return _galore_class(cls, config, model, is_layerwise=is_layerwise, **settings)


def galore_adafactor(config: OptimizerConfig, model: nn.Module | None, *, is_layerwise: bool) -> OptimizerClass:
    """Return GaLore's Adafactor, with an external learning rate."""
    _refuse_sharded(config, model)
    cls = _load(":GaLoreAdafactor", config)
    return _galore_class(cls, config, model, is_layerwise=is_layerwise, scale_parameter=False, relative_step=False)


def galore_adamw_8bit(config: OptimizerConfig, model: nn.Module | None, *, is_layerwise: bool) -> OptimizerClass:
    """Return GaLore's 8-bit AdamW."""
    check_cuda(config, reason="the package synchronises with the device in each update")
    cls = _load(":GaLoreAdamW8bit", config)
    base = load("bitsandbytes.optim.optimizer:Optimizer2State", "bitsandbytes>=0.44", config, extra="bitsandbytes")

    def start(self: Any, params: Any, **settings: Any) -> None:
        # The package passes arguments by position, and bitsandbytes has changed their order.
        base.__init__(self, "adam", params, optim_bits=8, **settings)

    fixed_class = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__init__": start})
    return _galore_class(fixed_class, config, model, is_layerwise=is_layerwise, betas=config.betas, eps=config.eps)


def _refuse_sharded(config: OptimizerConfig, model: nn.Module | None) -> None:
    if model is not None and any(hasattr(parameter, "placements") for parameter in model.parameters()):
        problem = f"Cannot use optim={config.name!r} with parameters that are sharded (DTensor)."
        reason = "The package's update mixes them with whole tensors."
        raise ConfigError(problem, reason, "Use optim='galore_adamw', or strategy='ddp'.")


def _load(name: str, config: OptimizerConfig) -> Any:
    return load(f"galore_torch{name}", "galore-torch", config, extra="galore")


def _galore_class(cls: Any, config: OptimizerConfig, model: nn.Module | None, **settings: Any) -> OptimizerClass:
    projector = _load(".galore_projector:GaLoreProjector", config)
    subclass, kwargs = low_rank_class(cls, config, model, low_rank=_GALORE, choices=_GALORE_CHOICES, **settings)
    subclass.make_projector = lambda self, group, state: projector(group["rank"])  # type: ignore[attr-defined]
    return subclass, kwargs


_APOLLO = {**_GALORE, "proj": "random", "scale_type": "channel", "scale": 1.0}
_APOLLO_CHOICES = {
    "proj": ("random", "svd"),
    "scale_type": ("channel", "tensor"),
    "proj_type": ("std", "reverse_std", "right", "left"),
}


def apollo_adamw(config: OptimizerConfig, model: nn.Module | None, *, is_layerwise: bool) -> OptimizerClass:
    """Return APOLLO's AdamW. Source: Zhu et al., 2024, arXiv 2412.05270."""
    _refuse_sharded(config, model)
    cls = load("apollo_torch:APOLLOAdamW", "apollo-torch", config, extra="apollo")
    settings: dict[str, Any] = {"is_layerwise": is_layerwise, "betas": config.betas, "eps": config.eps}
    subclass, kwargs = low_rank_class(cls, config, model, low_rank=_APOLLO, choices=_APOLLO_CHOICES, **settings)
    subclass.make_projector = cls._initialize_projector  # type: ignore[attr-defined]
    return subclass, kwargs
