"""Gradient checkpointing: activations are recomputed in the backward pass instead of kept; all, or selected ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hftrain.core.errors import ConfigError
from hftrain.core.log import warn_once
from hftrain.core.parameters import layer_hint
from hftrain.task.introspect import base_model

Undo = Callable[[], None]

# The other options of torch's checkpoint that a reentrant one takes.
_CHECKPOINT_OPTIONS = ("preserve_rng_state",)


def recompute_activations(model: nn.Module, options: Mapping[str, Any] | None) -> Undo:
    """Turn gradient checkpointing on and return a function that undoes the changes made here.

    Args:
        model: Mutated. A model with `gradient_checkpointing_enable` (or its newer name) does it itself.
        options: What that method receives; ``use_reentrant`` is False by default if parameters are frozen. With the key
            ``"layer_classes"``, a list of classes or of their names, every layer of those classes of any model is
            recomputed, and the other options are torch's own (`torch.utils.checkpoint.checkpoint`), of which
            ``use_reentrant`` is False here by default. ``"selective": "op"`` keeps the outputs of costly operations,
            and ``"selective": n`` recomputes every n-th layer.

    Source: the documented `gradient_checkpointing` and `gradient_checkpointing_kwargs`.
    """
    options = dict(options or {})
    classes, interval = read_selective(options, layer_hint(base_model(model)))
    if classes is not None:
        return _recompute_layers(model, classes, options, interval)
    # transformers 5 renamed the method, and warns about the older name.
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    enable = getattr(model, f"{kind}_checkpointing_enable", None)
    if enable is None:
        raise ConfigError(
            "Cannot use gradient_checkpointing=True.",
            f"{type(model).__name__} has no gradient_checkpointing_enable method.",
            'Name the layers to recompute: gradient_checkpointing_kwargs={"layer_classes": ["Block"]}.',
        )
    keyword = f"{kind}_checkpointing_kwargs"
    is_partly_frozen = not all(parameter.requires_grad for parameter in model.parameters())
    if is_partly_frozen and keyword in inspect.signature(enable).parameters:
        options.setdefault("use_reentrant", False)
    enable(**{keyword: options}) if options else enable()
    may_be_reentrant = options.get("use_reentrant", True)
    return _require_input_gradients(model) if is_partly_frozen and may_be_reentrant else lambda: None


def _require_input_gradients(model: nn.Module) -> Undo:
    """Make the embeddings' outputs require gradients: a reentrant checkpoint trains nothing unless an input does."""
    try:
        embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        embeddings = None
    if not isinstance(embeddings, nn.Module):
        warn_once(
            "Recomputed layers whose inputs require no gradient may not train: the model has frozen parameters, the "
            "checkpoint is reentrant, and get_input_embeddings() names no layer. Set use_reentrant=False in "
            "gradient_checkpointing_kwargs."
        )
        return lambda: None

    def require(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and isinstance(output, torch.Tensor):
            output.requires_grad_()

    return embeddings.register_forward_hook(require).remove


def _recompute_layers(
    model: nn.Module, classes: Sequence[Any] | str | type, options: dict[str, Any], interval: int
) -> Undo:
    kinds = [classes] if isinstance(classes, (str, type)) else list(classes)
    names = [kind if isinstance(kind, str) else kind.__name__ for kind in kinds]
    layers = [module for module in model.modules() if type(module) in kinds or type(module).__name__ in names]
    missing = set(names) - {type(layer).__name__ for layer in layers}
    if missing or not layers:
        raise ConfigError(
            f"gradient_checkpointing_kwargs named the layer classes {', '.join(names) or 'of no layer'}.",
            f"{type(model).__name__} has no layer of {', '.join(sorted(missing)) or 'them'}.",
            f"It has: {', '.join(sorted({type(module).__name__ for module in model.modules()}))}.",
        )
    layers = layers[::interval]
    for layer in layers:
        # Set on the instance, not by a wrapping module, so that parameters keep their names.
        run = _run_reentrant if options.get("use_reentrant") else checkpoint
        layer.forward = partial(run, layer.forward, **{"use_reentrant": False, **options})

    def undo() -> None:
        for layer in layers:
            layer.__dict__.pop("forward", None)

    return undo


def _run_reentrant(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call torch's reentrant checkpoint, which cannot pass keyword arguments to the function.

    It computes no gradients unless an input requires one, so one input is made to require them.
    """
    options = {name: kwargs.pop(name) for name in ("use_reentrant", *_CHECKPOINT_OPTIONS) if name in kwargs}
    names, values = list(kwargs), [*args, *kwargs.values()]
    tensors = {position: value for position, value in enumerate(values) if isinstance(value, torch.Tensor)}
    if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors.values()):
        position = next((position for position, tensor in tensors.items() if tensor.is_floating_point()), None)
        if position is not None:
            values[position] = tensors[position].detach().requires_grad_()

    def call(*values: Any) -> Any:
        return forward(*values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)))

    return checkpoint(call, *values, **options)


# Costly to compute, and small; without batched products, which hold the scores of attention.
_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_SAVED_NAMES = ("mm", "addmm", "convolution", *(f"_scaled_dot_product_{kind}" for kind in _ATTENTION))
_SAVED_OPS = {getattr(torch.ops.aten, name).default for name in _SAVED_NAMES}


def _choose_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Attention with dropout is repeated, so that the dropout after it draws the same numbers again.
    is_random = any(isinstance(value, float) and value > 0 for value in args) and op.name().startswith("aten::_scaled")
    return CheckpointPolicy.MUST_SAVE if op in _SAVED_OPS and not is_random else CheckpointPolicy.PREFER_RECOMPUTE


def read_selective(options: dict[str, Any], layers: Any) -> tuple[Any, int]:
    """Take the option ``"selective"`` out of those of torch's checkpoint, and add what it asks for.

    Args:
        options: Mutated. ``"op"`` keeps the outputs of matrix products, convolutions and attention; a number n
            recomputes every n-th layer.
        layers: The classes of the layers; None if none are named.

    Returns:
        The classes of the layers to recompute, None for the model's own choice; and n.
    """
    kind = options.pop("selective", None)
    if kind is None:
        return options.pop("layer_classes", None), 1
    is_number = type(kind) is int and kind > 0
    layers = options.pop("layer_classes", layers if is_number else None)
    if (kind != "op" and not (is_number and layers)) or options.get("use_reentrant") or "context_fn" in options:
        raise ConfigError(
            f"Cannot use gradient_checkpointing_kwargs={{'selective': {kind!r}}}.",
            "It is 'op', or n to recompute every n-th of the layer_classes (by default the model's _no_split_modules), "
            "and excludes use_reentrant=True and context_fn.",
            "Write {'selective': 'op'}, or {'selective': 2, 'layer_classes': ['Block']}.",
        )
    options["use_reentrant"] = False
    if kind == "op":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _choose_policy)
    return layers, kind if is_number else 1
