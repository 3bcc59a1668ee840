"""What is done to the model itself for a run's numerics and memory, and undone after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.core.log import warn_once
from hftrain.strategies.base import Strategy
from hftrain.task.liger import apply_liger_kernels
from hftrain.task.noise import find_embeddings
from hftrain.task.quantized import check_quantized, is_quantized
from hftrain.task.recompute import recompute_activations, switch_cache_off
from hftrain.trainer.placement import check_not_sharded
from hftrain.trainer.replicas import check_copies

Undo = Callable[[], None]


def prepare_model(args: TrainingArguments, strategy: Strategy, model: nn.Module, *, noise_alpha: float | None) -> None:
    """Refuse a model that the settings cannot work with, and put Liger kernels into it; at construction."""
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


class ModelChanges:
    """Change a model for as long as it trains.

    Args:
        args: Say how.
        strategy: May recompute activations itself.
    """

    def __init__(self, args: TrainingArguments, strategy: Strategy) -> None:
        self._args, self._strategy = args, strategy
        self._undo = ExitStack()
        self._switch_cache_off: Callable[[], Undo] | None = None
        self._put_cache_back: Undo | None = None

    def apply(
        self,
        model: nn.Module,
        *,
        noise_hooks: tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]] | None = None,
    ) -> None:
        """Turn gradient checkpointing and NEFTune on; before the model is wrapped.

        Args:
            model: Mutated.
            noise_hooks: The documented hooks that turn NEFTune's noise on and off; None where none is wanted.
        """
        args = self._args
        if args.gradient_checkpointing:
            options = args.gradient_checkpointing_kwargs
            recompute = self._strategy.recompute or recompute_activations
            self._undo.callback(recompute(model, options if isinstance(options, dict) else {}))
        if args.gradient_checkpointing or self._strategy.recomputes:
            self._switch_cache_off = partial(switch_cache_off, model)
            self._put_cache_back = self._switch_cache_off()
        if noise_hooks is not None:
            noise_hooks[0](model)
            self._undo.callback(noise_hooks[1], model)

    def save(self, save: Callable[[], None]) -> None:
        """Save with the configuration as the user has it."""
        if self._put_cache_back is None or self._switch_cache_off is None:
            save()
            return
        self._put_cache_back()
        try:
            save()
        finally:
            self._put_cache_back = self._switch_cache_off()

    def undo(self) -> None:
        """Leave the model as it was; safe to call twice."""
        self._undo.close()
        if self._put_cache_back is not None:
            self._put_cache_back()
            self._put_cache_back = None


def check_training(args: TrainingArguments, strategy: Strategy, model: nn.Module, *, compiles: bool) -> None:
    """Refuse, before anything is launched, to train a model that cannot be trained so."""
    check_copies(args, strategy, model, compiles=compiles)
    check_quantized(model, compiles=compiles)
