"""Adafactor as the documentation sets it: an outside learning rate, no scaling by the parameter."""

from __future__ import annotations

from torch import nn

from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, read_options
from hftrain.optim.packages import load


def adafactor(config: OptimizerConfig, model: nn.Module | None) -> OptimizerClass:
    """Handle transformers' Adafactor; torch's always scales by the parameter, so that it cannot stand in.

    Source: Shazeer and Stern, 2018, arXiv 1804.04235.
    """
    cls = load("transformers.optimization:Adafactor", "transformers", config, extra="transformers")
    options = read_options(config, {"clip_threshold": float, "decay_rate": float, "beta1": float | None})
    return cls, {"lr": config.learning_rate, "scale_parameter": False, "relative_step": False, **options}
