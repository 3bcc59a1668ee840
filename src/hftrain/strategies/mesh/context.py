"""Sequences that ranks share: context parallelism in the layers, sequence parallelism between their blocks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hftrain.core.errors import ConfigError, StrategyError, check_known
from hftrain.core.parameters import attention_of
from hftrain.strategies.mesh.attention import KINDS, SplitAttention
from hftrain.strategies.mesh.moves import join, split
from hftrain.strategies.mesh.plans import Placing
from hftrain.strategies.mesh.randomness import Apart
from hftrain.strategies.mesh.sequence import SequenceSplit, find_layers
from hftrain.strategies.mesh.styles import Colwise, Experts, Rowwise, TensorRanks

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


def find_blocks(layers: Sequence[nn.Module], found: Sequence[Placing]) -> set[nn.Module]:
    """Return the blocks of layers: the parents of modules that the plan splits (attention, MLP).

    Raises:
        ConfigError: A layer has no such blocks, or experts.
    """
    modules = {placing.name: placing.module for placing in found}
    inside = {module for layer in layers for module in layer.modules()}
    placings = [each for each in found if each.module in inside and isinstance(each.style, (Colwise, Rowwise, Experts))]
    blocks = {modules[_parent(each.name)] for each in placings}
    ends = {modules[_parent(each.name)] for each in placings if isinstance(each.style, Rowwise)}
    reason = ""
    if any(isinstance(each.style, Experts) for each in placings):
        reason = "The router of its experts sees every token on every rank, so its gradients would be counted twice."
    elif not blocks or blocks & set(layers):
        reason = "Its layers have no blocks (attention, MLP) around the modules that the plan splits."
    elif open_blocks := [name for name, module in modules.items() if module in blocks - ends]:
        reason = f"{open_blocks[0]} does not end with parts of the sequence: the plan has no 'rowwise' module in it."
    for name, child in (pair for layer in layers for pair in layer.named_children()):
        if not reason and blocks.isdisjoint(child.modules()) and (any(child.children()) or isinstance(child, MIXING)):
            reason = f"The plan splits nothing in its layers' {name}, which would see only a part of the sequence."
    if reason:
        raise ConfigError("Cannot use sequence_parallel=True with this model.", reason, "Leave sequence_parallel out.")
    return blocks


def share_sequence(
    owner: nn.Module, layers: Sequence[nn.Module], blocks: Iterable[nn.Module], ranks: TensorRanks
) -> None:
    """Let the tensor ranks share the sequence between the blocks of the layers. Mutates the modules.

    A block gets the whole sequence and ends with parts of it. Call this after the context ranks have split the
    sequence, if they do.

    Args:
        owner: The module whose forward pass calls the layers.
        ranks: The ranks in the layers, which get to know whether they share a sequence now.
    """
    for block in blocks:
        block.register_forward_pre_hook(partial(_gather, ranks), with_kwargs=True)
    SequenceSplit(
        owner=owner,
        layers=layers,
        parts=ranks.size,
        cut=lambda whole, dim: split(whole, ranks.mesh, dim),
        join=lambda part, dim: join(part, ranks.mesh, dim, sums=False),
        region=lambda length: partial(_sharing, ranks, length),
        along={},
    )


def _parent(name: str) -> str:
    """Return the name of the module around one, without adapters around it."""
    parts = name.split(".")
    if "lora_A" in parts or "lora_B" in parts:
        parts = parts[: min(parts.index(each) for each in ("lora_A", "lora_B") if each in parts)]
    elif parts[-1] == "base_layer":
        parts = parts[:-1]
    return ".".join(parts[:-1])


@contextmanager
def _sharing(ranks: TensorRanks, length: int, layer: nn.Module) -> Iterator[None]:
    """Share a sequence for the time of a layer's forward pass, and draw numbers apart in training."""
    if layer.training:
        ranks.apart.enter()
    ranks.sequence, ranks.length = True, length
    try:
        yield
    finally:
        ranks.sequence = False
        if layer.training:
            ranks.apart.leave()


def _gather(ranks: TensorRanks, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not ranks.sequence:
        return args, kwargs
    if args:
        return (_whole(ranks, args[0]), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: _whole(ranks, kwargs[name])}


def _whole(ranks: TensorRanks, part: Any) -> Any:
    return join(part, ranks.mesh, 1, sums=True)[:, : ranks.length].contiguous()  # models view their inputs
