"""Changes of the model during training, undone afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.strategies.base import Strategy
from hftrain.task.recompute import recompute_activations

Undo = Callable[[], None]


class ModelChanges:
    """Change a model during training, as the arguments say."""

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
        """Switch the cache off, enable gradient checkpointing and NEFTune, before the model is wrapped.

        Args:
            noise_hooks: The documented hooks that turn NEFTune's noise on and off; None for no noise.
        """
        args = self._args
        if args.gradient_checkpointing:
            options = args.gradient_checkpointing_kwargs
            recompute = self._strategy.recompute or recompute_activations
            self._undo.callback(recompute(model, options if isinstance(options, dict) else {}))
        if args.gradient_checkpointing or self._strategy.recomputes or not _keeps_cache(args):
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


@contextmanager
def without_cache(model: nn.Module, args: TrainingArguments) -> Iterator[None]:
    """Evaluate a model without its cache, unless the arguments keep it."""
    put_back = None if _keeps_cache(args) else switch_cache_off(model)
    try:
        yield
    finally:
        if put_back is not None:
            put_back()


def switch_cache_off(model: nn.Module) -> Undo:
    """Set `use_cache` to False in a transformers model's configurations and return a function that restores it.

    Mutates the configurations; a composite model has several. The cache of keys and values serves generation only:
    recomputing a forward pass would add to it a second time, and with it, documents packed in one row are not separate.
    """
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    configs = [config for config in found.values() if getattr(config, "use_cache", None)]
    before = [config.use_cache for config in configs]
    for config in configs:
        config.use_cache = False

    def undo() -> None:
        for config, value in zip(configs, before, strict=True):
            config.use_cache = value

    return undo


def _keeps_cache(args: TrainingArguments) -> bool:
    """Return whether a model's `config.use_cache` stays as it is: asked for, or an evaluation reads what it returns."""
    return bool(args.use_cache or getattr(args, "predict_with_generate", False) or args.past_index >= 0)
