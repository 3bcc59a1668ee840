"""Models sharded by ZeRO-3: each process holds a flat shard of every parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from hftrain.core.parameters import is_partitioned, is_split_by_zero, whole_shape
from hftrain.core.types import Shard
from hftrain.strategies.deepspeed.config import HALVES, find


def split_for_nvme(model: nn.Module, config: dict[str, Any]) -> None:
    """Shard a float32 model for NVMe offload before its engine does. Collective; mutates the model."""
    is_away = find(config, "zero_optimization.offload_param.device") == "nvme"
    if not is_away or is_partitioned(model) or any(find(config, f"{half}.enabled") for half in HALVES):
        return
    import deepspeed

    # On a device without float16, DeepSpeed 0.19's engine creates 16-bit buffers for 32-bit parameters.
    deepspeed.zero.Init(module=model, config_dict_or_path=config)


@contextmanager
def released_parameters(engine: Any) -> Iterator[None]:
    """Release gathered and prefetched parameters, as DeepSpeed does for its own checkpoints. Collective.

    The last forward pass may have prefetched parameters, and a parameter in flight cannot be partitioned.
    """
    optimizer: Any = getattr(engine, "optimizer", None)
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()
        yield
        optimizer.checkpoint_event_epilogue()
    else:
        yield


def gathered_tensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a model's state by name, with sharded parameters gathered one at a time, each until the next. Collective.

    DeepSpeed's own function treats all parameters on NVMe as tied and returns the first one for all.
    """
    import deepspeed

    for name, tensor in model.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([tensor] if is_split_by_zero(tensor) else []):
            yield name, tensor


def rows_of(model: nn.Module, *, rank: int, world_size: int) -> dict[str, Shard]:
    """Return this process's rows of every tensor in a model's state. Collective.

    Rows, unlike ZeRO's flat shards, can be joined by any number of processes.
    """
    shards = {}
    for name, tensor in gathered_tensors(model):
        whole = tensor.detach()
        if not whole.dim():
            if rank == 0:
                shards[name] = Shard(whole.cpu().clone())
            continue
        per_process = -(-len(whole) // world_size)
        rows = whole[rank * per_process : (rank + 1) * per_process]
        if len(rows):
            offsets = (rank * per_process, *(0 for _ in whole.shape[1:]))
            shards[name] = Shard(rows.cpu().clone(), offsets, tuple(whole.shape))
    return shards


def whole_of(model: nn.Module, *, is_main: bool) -> dict[str, Any]:
    """Return a model's full state in host memory on the main process, an empty dict on the others. Collective."""
    tensors: dict[str, Any] = {}
    to_host = cache(lambda tensor: tensor.detach().cpu().clone())
    for name, tensor in gathered_tensors(model):
        if is_main:  # a module's extra state may be no tensor
            tensors[name] = to_host(tensor) if isinstance(tensor, torch.Tensor) else tensor
    return tensors


def load_whole(model: nn.Module, state: Mapping[str, Any], *, is_main: bool) -> None:
    """Load a full state into a sharded model, one parameter at a time; skips sharded values. Collective.

    Raises:
        RuntimeError: Shapes do not match.
    """
    import deepspeed

    targets = model.state_dict(keep_vars=True)
    for name, value in state.items():
        target = targets[name]
        if is_split_by_zero(value) or target is value:
            continue
        shape = tuple(whole_shape(target))
        if shape != tuple(value.shape):
            raise RuntimeError(f"size mismatch for {name}: {tuple(value.shape)} in the checkpoint, {shape} here")
        is_split = is_split_by_zero(target)
        with torch.no_grad(), deepspeed.zero.GatheredParameters([target] if is_split else [], modifier_rank=0):
            if is_main or not is_split:
                target.copy_(value)
