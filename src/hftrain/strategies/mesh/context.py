"""Sequences that ranks share: context parallelism in the layers, sequence parallelism between their blocks."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hftrain.core.errors import ConfigError, StrategyError, check_known
from hftrain.core.parameters import attention_of
from hftrain.strategies.mesh.moves import Apart, exchange, join, split
from hftrain.strategies.mesh.plans import Placing
from hftrain.strategies.mesh.sequence import SequenceSplit, find_layers
from hftrain.strategies.mesh.styles import Colwise, Experts, Rowwise, TensorRanks

KINDS = ("auto", "ulysses", "gather")


class SplitAttention(TorchFunctionMode):
    """Compute the attention of the whole sequence where code calls it with this rank's queries, keys and values.

    The masks stay whole, so that windows, padding and packed documents need nothing here. `num_calls` counts the
    calls.

    Args:
        mesh: The one-dimensional mesh of the ranks that hold the parts, all of the same length.
        kind: ``"ulysses"`` exchanges parts of the sequence for parts of the heads, which the ranks must divide.
            ``"gather"`` collects all keys and values. ``"auto"`` takes the first where it can.
        length: The length of the whole sequence. The parts may be longer together; what they append is not attended.
    """

    def __init__(self, mesh: DeviceMesh, kind: str, length: int) -> None:
        super().__init__()
        self._mesh = mesh
        self._kind = kind
        self._length = length
        self.num_calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer the calls of attention, and pass on all others."""
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.num_calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if not query.dim() == key.dim() == 4 or query.shape[2] != key.shape[2]:
            raise StrategyError(
                "Cannot split this attention over ranks.",
                "Its queries and keys are not of one sequence, as [batch, heads, sequence, width].",
                "Use cp_size=1 for this model.",
                query=tuple(query.shape),
                key=tuple(key.shape),
            )
        if attn_mask is not None and not self._is_whole(attn_mask):
            raise StrategyError(
                "Cannot split this attention over ranks.",
                f"Its mask is not one of the whole sequence of {self._length}: the layer itself makes or cuts it.",
                "Use cp_size=1 for this model, or transformers 5.3 or newer, whose layers leave it whole.",
                mask=tuple(attn_mask.shape),
            )
        divides = query.shape[1] % self._mesh.size() == 0
        if self._kind == "ulysses" and not divides:
            raise StrategyError(
                "Cannot use context parallelism of kind 'ulysses'.",
                f"{self._mesh.size()} ranks do not divide {query.shape[1]} heads.",
                "Use kind 'gather' or 'auto', or other sizes of the mesh.",
            )
        attend = self._by_heads if divides and self._kind != "gather" else self._by_rows
        return attend(query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, **options)

    def _is_whole(self, mask: torch.Tensor) -> bool:
        return mask.dim() >= 2 and mask.shape[-1] == self._length and mask.shape[-2] in (1, self._length)

    def _by_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        num = self._mesh.size()
        repeats = math.lcm(key.shape[1], num) // key.shape[1]
        parts = [query] + [x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (key, value)]
        query, key, value = (exchange(x, self._mesh, 2, 1)[:, :, : self._length] for x in parts)
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            heads = mask.shape[-3] // num
            mask = mask.narrow(-3, self._mesh.get_local_rank() * heads, heads)
        output = scaled_dot_product_attention(query, key, value, mask, **options)
        padding = parts[0].shape[2] * num - self._length
        return exchange(torch.nn.functional.pad(output, (0, 0, 0, padding)), self._mesh, 1, 2)

    def _by_rows(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        is_causal: bool,
        **options: Any,
    ) -> torch.Tensor:
        key, value = (join(x, self._mesh, 2, sums=True)[:, :, : self._length] for x in (key, value))
        # Rows that were appended take those of the last position.
        rows = torch.arange(query.shape[2], device=query.device) + self._mesh.get_local_rank() * query.shape[2]
        rows = rows.clamp(max=self._length - 1)
        if is_causal:
            mask = rows[:, None] >= torch.arange(self._length, device=query.device)
        elif mask is not None and mask.shape[-2] > 1:
            mask = mask.index_select(-2, rows)
        return scaled_dot_product_attention(query, key, value, mask, **options)


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
