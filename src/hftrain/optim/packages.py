"""Optimizer classes of optional packages, imported on demand."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from hftrain.core.errors import ConfigError, MissingDependencyError
from hftrain.core.optional import require
from hftrain.optim.optimizers import OptimizerConfig


def load(path: str, requirement: str, config: OptimizerConfig, *, extra: str | None = None) -> Any:
    """Import an optimizer's class."""
    feature = f"optim={config.name!r}"
    require(requirement, feature=feature, extra=extra)
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"Cannot use {feature}.",
            f"{requirement!r} is installed, but {module} has no {name} that works here: {error}.",
            "Install a build of the package that suits this machine, or choose another optimizer.",
        ) from error


def check_cuda(config: OptimizerConfig, *, reason: str) -> None:
    """Raise if the run cannot use a CUDA device."""
    if config.use_cpu or not torch.cuda.is_available():
        raise ConfigError(
            f"Cannot use optim={config.name!r}.",
            f"It runs on CUDA devices only: {reason}.",
            "Use a machine with such a device, or choose another optimizer.",
            use_cpu=config.use_cpu,
        )
