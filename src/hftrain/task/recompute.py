"""Gradient checkpointing: activations are computed again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from hftrain.core.errors import ConfigError, explain

Undo = Callable[[], None]


def recompute_activations(model: nn.Module, options: Mapping[str, Any] | None) -> Undo:
    """Turn gradient checkpointing on and return what puts the model back as far as it changed here.

    Args:
        model: Mutated. A model with `gradient_checkpointing_enable` (or its newer name) does it itself.
        options: What that method receives. With the key ``"layer_classes"``, a list of classes or of their names, every
            layer of those classes of any model is recomputed, and the other options are torch's own
            (`torch.utils.checkpoint.checkpoint`), of which ``use_reentrant`` is False here by default.

    Raises:
        ConfigError: The model has no such method and no classes are given, or it has no layer of a class.

    Source: the documented `gradient_checkpointing` and `gradient_checkpointing_kwargs`.
    """
    options = dict(options or {})
    classes = options.pop("layer_classes", None)
    if classes is not None:
        return _recompute_layers(model, classes, options)
    # transformers 5 renamed the method, and warns about the older name.
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    enable = getattr(model, f"{kind}_checkpointing_enable", None)
    if enable is None:
        raise ConfigError(
            explain(
                "gradient_checkpointing=True was asked for.",
                f"{type(model).__name__} has no gradient_checkpointing_enable method.",
                'Name the layers to recompute: gradient_checkpointing_kwargs={"layer_classes": ["Block"]}.',
            )
        )
    enable(**{f"{kind}_checkpointing_kwargs": options}) if options else enable()
    return _nothing


def _recompute_layers(model: nn.Module, classes: Sequence[Any] | str | type, options: dict[str, Any]) -> Undo:
    wanted = [classes] if isinstance(classes, (str, type)) else list(classes)
    names = [kind if isinstance(kind, str) else kind.__name__ for kind in wanted]
    layers = [module for module in model.modules() if type(module) in wanted or type(module).__name__ in names]
    absent = set(names) - {type(layer).__name__ for layer in layers}
    if absent or not layers:
        raise ConfigError(
            explain(
                f"gradient_checkpointing_kwargs named the layer classes {', '.join(names) or 'of no layer'}.",
                f"{type(model).__name__} has no layer of {', '.join(sorted(absent)) or 'them'}.",
                f"It has: {', '.join(sorted({type(module).__name__ for module in model.modules()}))}.",
            )
        )
    for layer in layers:
        # On the instance and not by a wrapping module, so that parameters keep their names.
        layer.forward = partial(checkpoint, layer.forward, **{"use_reentrant": False, **options})

    def undo() -> None:
        for layer in layers:
            layer.__dict__.pop("forward", None)

    return undo


def switch_cache_off(model: nn.Module) -> Undo:
    """Set a transformers configuration's `use_cache` to False and return what sets it back; mutates the configuration.

    Keys and values that are kept for generation are of no use to a pass that is computed twice.
    """
    config: Any = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    if not before:
        return _nothing
    config.use_cache = False
    return partial(setattr, config, "use_cache", before)


def _nothing() -> None:
    """Change nothing."""
