"""Optimizers that packages define completely: those of vendors, StableAdamW, and the schedule-free ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, check_cuda, load, read_options


def vendors_adamw(config: OptimizerConfig, model: nn.Module | None, *, path: str) -> OptimizerClass:
    """Return a class that takes the arguments of torch's AdamW and no options."""
    package = path.partition(".")[0]
    if package == "apex":
        check_cuda(config, reason="it is one fused CUDA kernel")
    cls = load(path, package, config, extra="xla" if package == "torch_xla" else None)
    read_options(config, {})
    return cls, {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}


def stable_adamw(config: OptimizerConfig, model: nn.Module | None) -> OptimizerClass:
    """Return StableAdamW. Source: Wortsman et al., 2023, arXiv 2304.13013."""
    cls = load("optimi:StableAdamW", "torch-optimi", config, extra="optimi")
    options = read_options(config, {"decouple_lr": bool, "max_lr": float | None, "kahan_sum": bool | None})
    # If Triton is installed, the package uses it on the CPU too.
    triton = False if config.use_cpu or not torch.cuda.is_available() else None
    settings = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps, "triton": triton}
    return cls, {**settings, **options}


def schedule_free(config: OptimizerConfig, model: nn.Module | None, *, kind: str) -> OptimizerClass:
    """Return a schedule-free optimizer; RAdam needs no warm-up. Source: Defazio et al., 2024, arXiv 2405.15682."""
    cls = load(f"schedulefree:{kind}ScheduleFree", "schedulefree>=1.4", config, extra="schedulefree")
    extra_hints: dict[str, Any] = {"momentum": float} if kind == "SGD" else {}
    settings: dict[str, Any] = {} if kind == "SGD" else {"betas": config.betas, "eps": config.eps}
    if kind != "RAdam":
        settings["warmup_steps"] = config.warmup_steps
    options = read_options(config, {"weight_lr_power": float, "r": float, **extra_hints})
    return cls, {"lr": config.learning_rate, **settings, **options}
