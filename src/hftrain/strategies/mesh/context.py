"""Context parallelism: each rank computes a part of the sequence in the layers, attention included."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hftrain.core.errors import ConfigError, StrategyError, check_known
from hftrain.core.parameters import attention_of
from hftrain.strategies.mesh.attention import KINDS, SplitAttention
from hftrain.strategies.mesh.moves import join
from hftrain.strategies.mesh.randomness import Apart
from hftrain.strategies.mesh.sequence import SequenceSplit, find_layers

# What of a layer's arguments runs along the sequence, besides the hidden states.
ALONG = {
    "position_embeddings": -2,
    "position_embeddings_global": -2,
    "position_embeddings_local": -2,
    "position_ids": -1,
    "cache_position": -1,
}
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
# They mix positions, and would see those of one rank only.
MIXING = (nn.Conv1d, nn.Conv2d, nn.RNNBase, nn.BatchNorm1d, nn.MultiheadAttention)
_SPLIT: WeakSet[nn.Module] = WeakSet()
_TITLE = "Cannot use context parallelism with this model."


def split_context(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    kind: str = "auto",
    layer_classes: Sequence[str] | None = None,
    device: torch.device,
    multiple: int = 1,
) -> None:
    """Let the ranks of a mesh compute parts of the sequence in a model's layers; mutates the model.

    All ranks are given the same batch, whole, and get the same outputs, whole. Gradients are right after a mean over
    the ranks. Call this before the layers are wrapped for checkpointing or sharding.

    Args:
        kind: How attention sees the whole sequence; see `SplitAttention`.
        layer_classes: Class names of the repeated layers; None uses the model's own hint, `_no_split_modules`.
        device: The device that random numbers are drawn on.
        multiple: What divides the length of a part, for layers that split it further.

    Raises:
        ConfigError: The model cannot be split this way, or is split already.
    """
    check_known(kind, KINDS, f"Cannot use kind={kind!r}.", "No kind of context parallelism has that name.")
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        reason = "Its decoder attends to a second sequence, the encoder's."
        raise ConfigError(_TITLE, reason, "Use cp_size=1 for encoder-decoders.")
    _check_implementation(model)
    parent, layers = find_layers(model, layer_classes)
    if parent in _SPLIT:
        raise ConfigError(_TITLE, "Its sequence is split already.", "Call split_context once.")
    for layer in layers:
        _check_layer(layer)
    SequenceSplit(
        owner=parent,
        layers=layers,
        parts=mesh.size(),
        cut=functools.partial(_cut, mesh=mesh),
        join=lambda part, dim: join(part, mesh, dim, sums=True),
        region=lambda length: functools.partial(
            _split_layer, mesh=mesh, kind=kind, length=length, apart=Apart(mesh.get_local_rank(), device)
        ),
        along=ALONG,
        multiple=multiple,
    )
    model.register_forward_pre_hook(_check_call, with_kwargs=True)
    _SPLIT.add(parent)


def _cut(whole: torch.Tensor, dim: int, *, mesh: DeviceMesh) -> torch.Tensor:
    part = whole.shape[dim] // mesh.size()
    return whole.narrow(dim, mesh.get_local_rank() * part, part)


@contextlib.contextmanager
def _split_layer(layer: nn.Module, *, mesh: DeviceMesh, kind: str, length: int, apart: Apart) -> Iterator[None]:
    """Compute attention over all ranks; each draws its own numbers in training, or all parts had one dropout mask."""
    if layer.training:
        apart.enter()
    try:
        with SplitAttention(mesh, kind, length) as attention:
            yield
    finally:
        if layer.training:
            apart.leave()
    if not attention.num_calls:
        raise StrategyError(
            f"Cannot split the sequence of {type(layer).__name__} over ranks.",
            "It did not call torch.nn.functional.scaled_dot_product_attention, whose calls are split.",
            "Use attn_implementation='sdpa' (not 'eager', 'flash_attention_2' or 'flex_attention'), or cp_size=1.",
        )


def _check_layer(layer: nn.Module) -> None:
    if "forward" in vars(layer):
        reason = f"The forward pass of its {type(layer).__name__} is wrapped already, by checkpointing for example."
        raise ConfigError(_TITLE, reason, "Wrap layers after split_context.")
    for name, module in layer.named_modules():
        if isinstance(module, MIXING):
            reason = f"{type(layer).__name__}.{name} ({type(module).__name__}) mixes positions other than by attention."
            raise ConfigError(_TITLE, reason, "Use cp_size=1 for this model.")


def _check_implementation(model: nn.Module) -> None:
    implementation = attention_of(model, "sdpa")
    if implementation != "sdpa":
        reason = f"Its attention is computed by {implementation!r}, whose calls cannot be split over ranks."
        raise ConfigError(_TITLE, reason, "Load the model with attn_implementation='sdpa'.")


def _check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _check_implementation(model)
    for name in _OUTPUTS:
        if kwargs.get(name) or getattr(getattr(model, "config", None), name, False):
            reason = "The layers' own outputs are parts of the sequence there."
            raise StrategyError(f"Cannot use {name}=True with context parallelism.", reason, "Leave it out.")
