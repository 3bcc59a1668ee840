"""NEFTune: uniform noise on the embeddings while training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hftrain.core.errors import ConfigError
from hftrain.task.introspect import base_model


def find_embeddings(model: nn.Module) -> nn.Module:
    """Return the input embeddings of a model, or of the model inside its adapters."""
    base = base_model(model)
    getter = getattr(base, "get_input_embeddings", None)
    embeddings = getter() if callable(getter) else None
    if not isinstance(embeddings, nn.Module):
        raise ConfigError(
            "Cannot use neftune_noise_alpha.",
            f"{type(base).__name__} has no get_input_embeddings() that returns its embedding layer.",
            "Define that method, or leave neftune_noise_alpha out.",
        )
    return embeddings


def add_noise(embeddings: nn.Module, alpha: float) -> RemovableHandle:
    """Add noise to the output of `embeddings` in training mode, until the handle is removed.

    Args:
        embeddings: The embedding layer; mutated, it gets a forward hook.
        alpha: The noise is uniform in +-alpha / sqrt(tokens x hidden size).

    Shapes:
        The layer's output is ``[..., tokens, hidden]``.

    Source: Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, 2023.
    """

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        bound = alpha / math.sqrt(output.size(-2) * output.size(-1))
        return output + torch.empty_like(output).uniform_(-bound, bound)

    return embeddings.register_forward_hook(hook)
