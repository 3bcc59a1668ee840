"""Changes to the model for a run's numerics and memory, and checks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.core.log import warn_once
from hftrain.rules.model import check_copies, check_not_sharded
from hftrain.strategies.base import Strategy
from hftrain.task.liger import apply_liger_kernels
from hftrain.task.noise import find_embeddings
from hftrain.task.quantized import check_quantized, is_quantized


def prepare_model(args: TrainingArguments, strategy: Strategy, model: nn.Module, *, noise_alpha: float | None) -> None:
    """Raise if the model does not work with the settings, and apply Liger kernels; called at construction."""
    check_not_sharded(model)
    if noise_alpha is not None:
        find_embeddings(model)
    if args.use_cache is not None:
        _set_cache(model, use_cache=args.use_cache)
    if args.use_liger_kernel:
        apply_liger_kernels(model, args.liger_kernel_config)
    if is_quantized(model):
        # Moving quantized weights fails or loses them.
        strategy.place_model = False


def _set_cache(model: nn.Module, *, use_cache: bool) -> None:
    config = getattr(model, "config", None)
    if config is None or isinstance(config, Mapping):
        warn_once(f"use_cache={use_cache} has no effect: {type(model).__name__} has no config to set it in.")
        return
    config.use_cache = use_cache
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.use_cache = use_cache


def check_training(args: TrainingArguments, strategy: Strategy, model: nn.Module, *, compiles: bool) -> None:
    """Raise, before anything is launched, if the model cannot be trained with these settings."""
    check_copies(args, strategy, model, compiles=compiles)
    check_quantized(model, compiles=compiles)
