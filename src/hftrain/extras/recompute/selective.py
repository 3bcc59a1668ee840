"""Selective activation checkpointing: what is kept, by operation or by layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hftrain.core.errors import ConfigError

# Costly to compute, and small; without batched products, which hold the scores of attention.
_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_NAMES = ("mm", "addmm", "convolution", *(f"_scaled_dot_product_{kind}" for kind in _ATTENTION))
_KEPT = {getattr(torch.ops.aten, name).default for name in _NAMES}


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Attention with dropout is repeated, so that the dropout after it draws the same numbers again.
    draws = any(isinstance(value, float) and value > 0 for value in args) and op.name().startswith("aten::_scaled")
    return CheckpointPolicy.MUST_SAVE if op in _KEPT and not draws else CheckpointPolicy.PREFER_RECOMPUTE


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
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep)
    return layers, kind if is_number else 1
