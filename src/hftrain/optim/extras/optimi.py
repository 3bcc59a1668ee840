"""torch-optimi's StableAdamW: AdamW that clips its updates as Adafactor does."""

from __future__ import annotations

import torch
from torch import nn

from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, load, read_options


def stable_adamw(config: OptimizerConfig, model: nn.Module | None) -> OptimizerClass:
    """Return StableAdamW. Source: Wortsman et al., 2023, arXiv 2304.13013."""
    cls = load("optimi:StableAdamW", "torch-optimi", config, extra="optimi")
    options = read_options(config, {"decouple_lr": bool, "max_lr": float | None, "kahan_sum": bool | None})
    # If Triton is installed, the package uses it on the CPU too.
    triton = False if config.use_cpu or not torch.cuda.is_available() else None
    settings = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps, "triton": triton}
    return cls, {**settings, **options}
