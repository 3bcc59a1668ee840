"""AdamW of the packages for XLA devices, Ascend NPUs and NVIDIA's Apex."""

from __future__ import annotations

from torch import nn

from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, read_options
from hftrain.optim.packages import check_cuda, load


def adamw(config: OptimizerConfig, model: nn.Module | None, *, path: str) -> OptimizerClass:
    """Handle a class that takes what torch's AdamW takes, and no option."""
    package = path.partition(".")[0]
    if package == "apex":
        check_cuda(config, reason="it is one fused CUDA kernel")
    cls = load(path, package, config, extra="xla" if package == "torch_xla" else None)
    read_options(config, {})
    return cls, {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
