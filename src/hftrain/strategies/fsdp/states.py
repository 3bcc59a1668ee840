"""Gather, split and shard the states of sharded tensors."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hftrain.core.errors import CheckpointError
from hftrain.core.parameters import block_of, local_part, stored_in
from hftrain.core.tree import map_tensors
from hftrain.core.types import Shard, StoredTensor


def gather(tree: Any, *, device: torch.device, keeps: bool) -> Any:
    """Gather every sharded tensor of a nested structure on the CPU. Collective.

    Args:
        tree: The same structure on every process; a tensor that appears twice appears twice in the result.
        keeps: Whether this process needs the result; otherwise sharded tensors become None to save memory.
    """

    @functools.cache
    def whole(tensor: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(tensor, DTensor):
            return tensor
        full: Any = tensor.detach().to(device)
        full = full.full_tensor()
        return full.cpu() if keeps else None

    return map_tensors(tree, whole)


def whole_tensors(state: Mapping[str, Any], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a flat state, gathered one at a time. Collective."""
    for name, tensor in state.items():
        whole: Any = tensor.detach().to(device)
        yield name, whole.full_tensor() if isinstance(whole, DTensor) else whole


def split_like(value: Any, like: Any) -> Any:
    """Return this process's shard of a full tensor, sharded as `like`; return anything else unchanged.

    Of a `StoredTensor`, only this shard is read, or the whole tensor if `like` is not sharded; nothing if `like` is on
    the meta device, as another stage of a pipeline has it: `like` itself is returned.
    """
    if not isinstance(value, (torch.Tensor, StoredTensor)) or isinstance(value, DTensor):
        return value
    if isinstance(like, torch.Tensor) and like.is_meta and value.shape == like.shape:
        return like
    # The loading code reports a mismatch or handles such values.
    return _part(value, like if isinstance(like, DTensor) and value.shape == like.shape else None)


def _part(value: torch.Tensor | StoredTensor, like: Any) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return value.read() if isinstance(value, StoredTensor) else value
    offsets, sizes = block_of(like)
    if isinstance(value, StoredTensor):
        block = value.read(offsets, sizes)
    else:
        block = value[tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))].contiguous()
    return DTensor.from_local(block, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def read_stored(model: nn.Module, device: Any, *, elsewhere: Any) -> Mapping[str, StoredTensor]:
    """Give a sharded model this process's blocks of its stored tensors, one at a time; return where they were stored.

    Tied tensors stay the same object. Mutates the model, but not the parameters `elsewhere`, of other stages.

    Raises:
        CheckpointError: A file is damaged, or has different values for tied tensors.
    """
    file_tensors = stored_in(model, take=True)
    replacements: dict[int, tuple[Any, Any, StoredTensor]] = {}
    for name, value in file_tensors.items():
        path, _, leaf = name.rpartition(".")
        target = getattr(model.get_submodule(path), leaf)
        if target in elsewhere:
            continue
        _, replacement, source = replacements.get(id(target), (None, None, value))
        if replacement is None or source is not value:
            tensor = _part(value, target).to(device, target.dtype)
            if replacement is not None and not local_part(tensor).equal(local_part(replacement)):
                reason = f"They have other values for {name} than for another name of the same parameter."
                raise CheckpointError("Cannot read the weights from their files.", reason, "Build the model untied.")
            replacement = nn.Parameter(tensor, target.requires_grad) if isinstance(target, nn.Parameter) else tensor
            # The target is kept, so that its id is not used again.
            replacements[id(target)] = target, replacement, value
        setattr(model.get_submodule(path), leaf, replacement)
    return file_tensors


def take_sharded(tree: Any, path: tuple[Any, ...], found: dict[str, Any]) -> Any:
    """Return nested mappings with None for sharded tensors, which are added to `found` by their path as JSON.

    Tensors on the meta device become None, too: another stage of a pipeline has them.
    """
    if isinstance(tree, DTensor):
        found[json.dumps(path)] = tree.detach()
    if isinstance(tree, DTensor) or (isinstance(tree, torch.Tensor) and tree.is_meta):
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
    shards = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            if _is_writer(value):
                shards[name] = Shard(value.to_local().detach(), block_of(value)[0], tuple(value.shape))
        elif isinstance(value, torch.Tensor) and is_main:
            shards[name] = Shard(value.detach())
    return shards


def split_optimizer(state: dict[str, Any], is_split: Callable[[Any], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an optimizer's state without the values that are split, and these by ``"<parameter index>.<key>"``."""
    entries = state["state"].items()
    plain = {index: {key: x for key, x in entry.items() if not is_split(x)} for index, entry in entries}
    return {**state, "state": plain}, {
        f"{i}.{key}": x for i, entry in entries for key, x in entry.items() if is_split(x)
    }


def _is_writer(tensor: DTensor) -> bool:
    """Return whether this process writes its block: there is one, and no process before it has the same."""
    place = tensor.device_mesh.get_coordinate()
    if place is None or any(at for at, each in zip(place, tensor.placements, strict=True) if each.is_replicate()):
        return False
    return tensor.to_local().numel() > 0 or not any(place)


def norm_of(grads: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of gradients that are sharded over one mesh, or plain. Collective.

    Computes with local tensors: what torch derives for operations on several mesh dimensions takes seconds.
    """
    local = [local_part(grad) for grad in grads]
    # A rank without parts of its own would have a norm of the default dtype.
    dtype = functools.reduce(torch.promote_types, {part.dtype for part in local})
    meshes = {grad.device_mesh if isinstance(grad, DTensor) else None for grad in grads}
    if len(meshes) > 1:
        raise ValueError("The gradients are sharded over different meshes.")
    (mesh,) = meshes
    if mesh is None:
        return torch.nn.utils.get_total_norm(local, norm_type).to(dtype)
    coordinate = mesh.get_coordinate() or ()
    # A part that several ranks hold counts on the first one.
    parts = [
        part
        for grad, part in zip(grads, local, strict=True)
        if not any(index for index, each in zip(coordinate, grad.placements, strict=True) if each.is_replicate())  # type: ignore[attr-defined]
    ]
    norm = torch.nn.utils.get_total_norm(parts, norm_type).to(local[0].device, dtype)
    is_max = math.isinf(norm_type)
    total = norm if is_max else norm**norm_type
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=mesh.get_group(dim))
    return total if is_max else total ** (1.0 / norm_type)


def scale_down(grads: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most `max_norm` (infinite: any); return the norm before."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        local_part(grad).mul_(factor.to(grad.device))
    return norm
