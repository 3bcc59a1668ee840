"""Gather, split and shard the states of sharded tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from hftrain.core.tree import map_tensors
from hftrain.core.types import Shard


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
    """Return this process's shard of a full tensor, sharded as `like`; return anything else unchanged."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not isinstance(like, DTensor):
        return value
    if value.shape != like.shape:
        return value  # the loading code reports the mismatch or handles such values
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


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
    """Return this process's part of a flat state: its rows of sharded tensors, and the rest on the main process.

    If several processes hold replicas of the same rows, the first one writes them.
    """
    found = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            shard = _rows(value)
            if shard is not None:
                found[name] = shard
        elif isinstance(value, torch.Tensor) and is_main:
            found[name] = Shard(value.detach())
    return found


def _rows(tensor: DTensor) -> Shard | None:
    """Return this process's rows; None if another process writes them or there are none."""
    mesh, local = tensor.device_mesh, tensor.to_local()
    *copies, part = mesh.get_coordinate() or [0]
    if any(copies) or not local.numel():
        return None
    # Rows are divided as by torch.chunk.
    per_process = -(-tensor.shape[0] // mesh.size(mesh.ndim - 1))
    return Shard(local.detach(), part * per_process, tensor.shape[0])
