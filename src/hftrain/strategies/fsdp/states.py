"""Gather, split and shard the states of sharded tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hftrain.core.tree import map_tensors
from hftrain.core.types import Shard, StoredTensor

# The planner takes some 200 microseconds a tensor.
_blocks: WeakKeyDictionary[DeviceMesh, dict[Any, tuple[tuple[int, ...], tuple[int, ...]]]] = WeakKeyDictionary()


def gather(tree: Any, *, device: torch.device, keeps: bool) -> Any:
    """Gather every sharded tensor of a nested structure on the CPU. Collective.

    Args:
        tree: The same structure on every process; a tensor that appears twice appears twice in the result.
        device: The device of the communication.
        keeps: Whether this process needs the result; otherwise sharded tensors become None to save memory.
    """
    known: dict[int, torch.Tensor | None] = {}

    def whole(tensor: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(tensor, DTensor):
            return tensor
        if id(tensor) not in known:
            full: Any = tensor.detach().to(device)
            full = full.full_tensor()
            known[id(tensor)] = full.cpu() if keeps else None
        return known[id(tensor)]

    return map_tensors(tree, whole)


def whole_tensors(state: Mapping[str, Any], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a flat state, gathered one at a time. Collective."""
    for name, tensor in state.items():
        whole: Any = tensor.detach().to(device)
        yield name, whole.full_tensor() if isinstance(whole, DTensor) else whole


def split_like(value: Any, like: Any) -> Any:
    """Return this process's shard of a full tensor, sharded as `like`; return anything else unchanged.

    Of a `StoredTensor`, only this shard is read, or the whole tensor if `like` is not sharded.
    """
    if not isinstance(value, (torch.Tensor, StoredTensor)) or isinstance(value, DTensor):
        return value
    if not isinstance(like, DTensor) or value.shape != like.shape:
        # the loading code reports a mismatch or handles such values
        return value.read() if isinstance(value, StoredTensor) else value
    offsets, sizes = block_of(like)
    if isinstance(value, StoredTensor):
        own = value.read(offsets, sizes)
    else:
        own = value[tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))].contiguous()
    return DTensor.from_local(own, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def take_sharded(tree: Any, path: tuple[Any, ...], found: dict[str, Any]) -> Any:
    """Return nested mappings with None for sharded tensors, which are added to `found` by their path as JSON."""
    if isinstance(tree, DTensor):
        found[json.dumps(path)] = tree.detach()
        return None
    if isinstance(tree, Mapping):
        return {key: take_sharded(value, (*path, key), found) for key, value in tree.items()}
    return tree


def split_tree_like(tree: Any, like: Any) -> Any:
    """Return nested mappings with this process's shards of full tensors, sharded as in `like`."""
    if isinstance(tree, Mapping) and isinstance(like, Mapping):
        return {key: split_tree_like(value, like.get(key)) for key, value in tree.items()}
    return split_like(value=tree, like=like)


def pieces(state: Mapping[str, Any], *, is_main: bool) -> dict[str, Shard]:
    """Return this process's part of a flat state: its blocks of sharded tensors, and the rest on the main process.

    If several processes hold replicas of the same block, the first one writes it.
    """
    found = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            if _is_writer(value):
                found[name] = Shard(value.to_local().detach(), block_of(value)[0], tuple(value.shape))
        elif isinstance(value, torch.Tensor) and is_main:
            found[name] = Shard(value.detach())
    return found


def block_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where this process's block begins in the whole tensor, and its shape, according to torch's planner."""
    mesh = tensor.device_mesh
    known = _blocks.setdefault(mesh, {})
    key = (*(mesh.get_coordinate() or ()), tensor.shape, tensor.placements)
    if key not in known:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({"": tensor.detach()})
        (item,) = planner.create_local_plan().items
        chunk = item.tensor_data.chunk  # type: ignore[union-attr]
        known[key] = tuple(chunk.offsets), tuple(chunk.sizes)
    return known[key]


def _is_writer(tensor: DTensor) -> bool:
    """Return whether this process writes its block: there is one, and no process before it has the same."""
    place = tensor.device_mesh.get_coordinate()
    if place is None or any(at for at, each in zip(place, tensor.placements, strict=True) if each.is_replicate()):
        return False
    return tensor.to_local().numel() > 0 or not any(place)
