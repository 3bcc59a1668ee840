"""Changes of the model during training, undone afterwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.evaluation.generating import Undo, keeps_cache, switch_cache_off
from hftrain.strategies.base import Strategy
from hftrain.task.recompute import recompute_activations


class ModelChanges:
    """Change a model during training, as the arguments say."""

    def __init__(self, args: TrainingArguments, strategy: Strategy) -> None:
        self._args, self._strategy = args, strategy
        self._undo = ExitStack()
        self._switch_cache_off: Callable[[], Undo | None] | None = None
        self._put_cache_back: Undo | None = None

    def apply(
        self,
        model: nn.Module,
        *,
        noise_hooks: tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]] | None = None,
    ) -> None:
        """Switch the cache off, enable gradient checkpointing and NEFTune, before the model is wrapped.

        Args:
            noise_hooks: The documented hooks that turn NEFTune's noise on and off; None for no noise.
        """
        args = self._args
        if args.gradient_checkpointing:
            options = args.gradient_checkpointing_kwargs
            recompute = self._strategy.recompute or recompute_activations
            self._undo.callback(recompute(model, options if isinstance(options, dict) else {}))
        if args.gradient_checkpointing or self._strategy.recomputes or not keeps_cache(args):
            self._switch_cache_off = partial(switch_cache_off, model)
            self._put_cache_back = self._switch_cache_off()
        if noise_hooks is not None:
            noise_hooks[0](model)
            self._undo.callback(noise_hooks[1], model)

    def save(self, save: Callable[[], None]) -> None:
        """Save with the user's original configuration."""
        if self._put_cache_back is None or self._switch_cache_off is None:
            save()
            return
        self._put_cache_back()
        try:
            save()
        finally:
            self._put_cache_back = self._switch_cache_off()

    def undo(self) -> None:
        """Restore the model; safe to call twice."""
        self._undo.close()
        if self._put_cache_back is not None:
            self._put_cache_back()
            self._put_cache_back = None
