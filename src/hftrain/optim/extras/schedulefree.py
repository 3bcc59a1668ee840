"""Schedule-free optimizers: averaged weights instead of a decaying learning rate."""

from __future__ import annotations

from typing import Any

from torch import nn

from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, load, read_options


def adamw(config: OptimizerConfig, model: nn.Module | None) -> OptimizerClass:
    """Return schedule-free AdamW. Source: Defazio et al., 2024, arXiv 2405.15682."""
    return _paired("AdamW", config, betas=config.betas, eps=config.eps, warmup_steps=config.warmup_steps)


def radam(config: OptimizerConfig, model: nn.Module | None) -> OptimizerClass:
    """Return schedule-free RAdam, which needs no warm-up."""
    return _paired("RAdam", config, betas=config.betas, eps=config.eps)


def sgd(config: OptimizerConfig, model: nn.Module | None) -> OptimizerClass:
    """Return schedule-free SGD."""
    return _paired("SGD", config, extra_hints={"momentum": float}, warmup_steps=config.warmup_steps)


def _paired(
    kind: str, config: OptimizerConfig, *, extra_hints: dict[str, Any] | None = None, **settings: Any
) -> OptimizerClass:
    cls = load(f"schedulefree:{kind}ScheduleFree", "schedulefree>=1.4", config, extra="schedulefree")
    options = read_options(config, {"weight_lr_power": float, "r": float, **(extra_hints or {})})
    return cls, {"lr": config.learning_rate, **settings, **options}
