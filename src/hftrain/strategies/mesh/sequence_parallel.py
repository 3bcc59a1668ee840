"""Sequence parallelism: tensor ranks also share the activations between the layers' blocks, along the sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.strategies.mesh.context import MIXING
from hftrain.strategies.mesh.moves import join, split
from hftrain.strategies.mesh.plans import Placing
from hftrain.strategies.mesh.sequence import SequenceSplit
from hftrain.strategies.mesh.styles import Colwise, Experts, Rowwise, TensorRanks


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
