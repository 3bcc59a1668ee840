"""States of split tensors: put together, taken apart, and handed out in pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from hftrain.core.tree import map_tensors
from hftrain.core.types import Shard


def gather(tree: Any, *, device: torch.device, keeps: bool) -> Any:
    """Put every split tensor of a nested structure together, on the CPU; collective.

    Args:
        tree: The same structure in every process; a tensor that appears twice appears twice in the answer.
        device: Where the exchange runs.
        keeps: Whether this process wants the answer; else split tensors become None, and take no memory.
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


def split_like(value: Any, like: Any) -> Any:
    """Return this process's part of a whole tensor, split as `like` is; anything else is returned as it is."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not isinstance(like, DTensor):
        return value
    if value.shape != like.shape:
        return value  # whoever loads it says so, or knows that it belongs to no single element
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def pieces(state: Mapping[str, Any], *, is_main: bool) -> dict[str, Shard]:
    """Return what this process writes of a flat state: its rows of split tensors; the main process writes the others.

    Where processes hold copies of each other's rows, the first of them writes.
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
    """Return this process's rows; None where another writes them, or there are none."""
    mesh, local = tensor.device_mesh, tensor.to_local()
    *copies, part = mesh.get_coordinate() or [0]
    if any(copies) or not local.numel():
        return None
    # Rows are handed out as torch.chunk does.
    per_process = -(-tensor.shape[0] // mesh.size(mesh.ndim - 1))
    return Shard(local.detach(), part * per_process, tensor.shape[0])
