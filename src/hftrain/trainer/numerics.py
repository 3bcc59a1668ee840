"""What is done to the model itself for a run's numerics and memory, and undone after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from hftrain.core.log import warn_once
from hftrain.task.liger import apply_liger_kernels
from hftrain.task.noise import find_embeddings
from hftrain.task.quantized import check_quantized, is_quantized
from hftrain.task.recompute import recompute_activations, switch_cache_off
from hftrain.trainer.placement import check_not_sharded
from hftrain.trainer.replicas import check_copies

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

Undo = Callable[[], None]


def prepare_model(trainer: Trainer) -> None:
    """Refuse a model that the settings cannot work with, and put Liger kernels into it; at construction."""
    args, model = trainer.args, trainer.model
    check_not_sharded(model)
    if trainer.neftune_noise_alpha is not None:
        find_embeddings(model)
    if args.use_cache is not None:
        _set_cache(model, use_cache=args.use_cache)
    if args.use_liger_kernel:
        apply_liger_kernels(model, args.liger_kernel_config)
    if is_quantized(model):
        # Moving quantized weights fails or loses them.
        trainer.strategy.place_model = False


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
        trainer: Whose model, by its arguments.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._undo = ExitStack()
        self._put_cache_back: Undo | None = None

    def apply(self, model: nn.Module) -> None:
        """Turn gradient checkpointing and NEFTune on; before the model is wrapped."""
        trainer, args = self.trainer, self.trainer.args
        if args.gradient_checkpointing:
            options = args.gradient_checkpointing_kwargs
            self._undo.callback(recompute_activations(model, options if isinstance(options, dict) else None))
        if args.gradient_checkpointing or trainer.strategy.recomputes:
            self._switch_cache_off(model)
        if trainer.neftune_noise_alpha is not None:
            trainer._activate_neftune(model)
            self._undo.callback(trainer._deactivate_neftune, model)

    def save(self, save: Callable[[], None]) -> None:
        """Save with the configuration as the user has it."""
        if self._put_cache_back is None:
            save()
            return
        self._put_cache_back()
        try:
            save()
        finally:
            self._switch_cache_off(self.trainer.model)

    def undo(self) -> None:
        """Leave the model as it was; safe to call twice."""
        self._undo.close()
        if self._put_cache_back is not None:
            self._put_cache_back()
            self._put_cache_back = None

    def _switch_cache_off(self, model: nn.Module) -> None:
        self._put_cache_back = switch_cache_off(model)


def check_training(trainer: Trainer) -> None:
    """Refuse, before anything is launched, to train a model that cannot be trained so."""
    check_copies(trainer)
    check_quantized(trainer.model, compiles=trainer.compiler.config is not None)
