"""AdamW of the packages for XLA devices, Ascend NPUs and NVIDIA's Apex."""

from __future__ import annotations

from torch import nn

from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, check_cuda, load, read_options


def adamw(config: OptimizerConfig, model: nn.Module | None, *, path: str) -> OptimizerClass:
    """Return a class that takes the arguments of torch's AdamW and no options."""
    package = path.partition(".")[0]
    if package == "apex":
        check_cuda(config, reason="it is one fused CUDA kernel")
    cls = load(path, package, config, extra="xla" if package == "torch_xla" else None)
    read_options(config, {})
    return cls, {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
