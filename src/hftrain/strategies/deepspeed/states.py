"""DeepSpeed's process-wide state, and the optimizer state of its engine as plain tensors.

DeepSpeed's own checkpoints are pickles, which can run code when they are read. A checkpoint here holds only tensors
and numbers, so the state is read from the engine's attributes instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import CheckpointError, StrategyError
from hftrain.core.parameters import is_partitioned, is_split_by_zero, whole_shape
from hftrain.core.tree import map_tensors
from hftrain.core.types import Shard
from hftrain.strategies.deepspeed.config import HALVES, find
from hftrain.strategies.fsdp.states import split_optimizer

# The attributes with the float32 tensors that DeepSpeed's optimizers update: ZeRO-3, ZeRO-1/2 and 16-bit models.
_MASTERS = (
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
)
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_MASTER = "master"
_LAYOUTS = {
    "whole": "ZeRO stage 0",
    "flat": "ZeRO stage 1 or 2",
    "turns": "ZeRO stage 1 or 2 with round_robin_gradients",
    "each": "ZeRO stage 3",
}


def is_plain(engine: Any) -> bool:
    """Return whether an engine updates the model's own parameters with an unwrapped optimizer."""
    return engine.optimizer is engine.basic_optimizer


def take_state(engine: Any) -> dict[str, Any]:
    """Return this process's shard of the optimizer state, without copying what is in memory.

    Raises:
        StrategyError: DeepSpeed stores the state in an unsupported form.
    """
    base, state = engine.basic_optimizer, {}
    for index, master in enumerate(_masters(engine)):
        with swapped_in(engine, index) as is_read:
            entry = {_MASTER: master.detach(), **base.state.get(master, {})}
            state[index] = map_tensors(entry, torch.Tensor.clone) if is_read else entry
    groups = [{key: value for key, value in group.items() if key != "params"} for group in base.param_groups]
    scale = {name: getattr(part, name) for part in _scalers(engine) for name in _SCALE if hasattr(part, name)}
    counters = {name: getattr(engine, name) for name in _COUNTERS}
    facts = {"scale": scale, "counters": counters, "layout": _layout(engine)}
    return {"state": state, "param_groups": groups, "deepspeed": facts}


def split_off(state: dict[str, Any], *, rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Shard]]:
    """Split a state into the values that are equal on all ranks and this process's shards of the others."""
    plain, split = split_optimizer(state, lambda value: isinstance(value, torch.Tensor) and value.dim() > 0)
    flat = {name: value.detach().reshape(-1) for name, value in split.items()}
    return plain, {name: Shard(x, (rank * len(x),), (world_size * len(x),)) for name, x in flat.items()}


def put_state(engine: Any, state: dict[str, Any], *, rank: int, world_size: int) -> None:
    """Restore a result of `take_state`, or the joined shards of all processes; mutates the engine.

    Raises:
        CheckpointError: The state is not from DeepSpeed, or from another stage, precision or number of processes.
    """
    layout = state.get("deepspeed", {}).get("layout")
    if layout is not None and layout != _layout(engine):
        raise _misfit(f"It was saved with {_LAYOUTS[layout]}, and {_LAYOUTS[_layout(engine)]} uses another layout.")
    base, masters = engine.basic_optimizer, _masters(engine)
    if "deepspeed" not in state or len(state["state"]) != len(masters):
        raise _misfit("It was not saved by DeepSpeed with this ZeRO stage and this precision.")
    for index, master in enumerate(masters):
        with swapped_in(engine, index):
            _restore(base.state[master], master, state["state"][index], rank=rank, world_size=world_size)
    for group, settings in zip(base.param_groups, state["param_groups"], strict=True):
        group.update(settings)
    for part in _scalers(engine):
        vars(part).update({name: value for name, value in state["deepspeed"]["scale"].items() if name in vars(part)})
    for name, value in state["deepspeed"]["counters"].items():
        setattr(engine, name, value)


def _restore(slot: dict[str, Any], master: torch.Tensor, entry: dict[str, Any], *, rank: int, world_size: int) -> None:
    values = {key: _own(value, master, rank=rank, world_size=world_size) for key, value in entry.items()}
    master.data.copy_(values.pop(_MASTER))
    for key, value in values.items():
        if isinstance(slot.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
            # In place, because DeepSpeed may hold other references to the tensor.
            slot[key].copy_(value.view_as(slot[key]))
        else:
            slot[key] = value.to(master.device) if isinstance(value, torch.Tensor) and value.dim() else value


@contextmanager
def swapped_in(engine: Any, index: int) -> Iterator[bool]:
    """Load a part of the optimizer state from NVMe if it is offloaded; yield whether it was.

    Changes made inside the context are written back.
    """
    optimizer = engine.optimizer
    is_away = getattr(optimizer, "swap_optimizer", False) and optimizer._swappable_optimizer_subgroup(index)
    if is_away:
        optimizer._optimizer_states_and_gradient_swap_in(index)
    try:
        yield is_away
    finally:
        if is_away:
            optimizer._optimizer_states_and_gradient_swap_out(index)


def _layout(engine: Any) -> str:
    """Return how the state is divided among processes; stages 1 and 2 use the same layout."""
    stage = engine.zero_optimization_stage()
    takes_turns = getattr(engine.optimizer, "round_robin_gradients", False)
    return "whole" if stage == 0 else "each" if stage == 3 else "turns" if takes_turns else "flat"


def _masters(engine: Any) -> list[torch.Tensor]:
    for name in _MASTERS:
        groups = getattr(engine.optimizer, name, None)
        if groups:
            return [each for group in groups for each in (group if isinstance(group, (list, tuple)) else [group])]
    raise StrategyError(
        f"Cannot save or restore the state of DeepSpeed's {type(engine.optimizer).__name__}.",
        "This version does not know where it keeps its float32 parameters.",
        "Use ZeRO stage 1, 2 or 3, or save_only_model=True.",
    )


def _scalers(engine: Any) -> list[Any]:
    """Return the objects that may hold the loss scale: the optimizer and its scalers."""
    found = (getattr(engine.optimizer, name, None) for name in ("loss_scaler", "loss_scale_config"))
    return [engine.optimizer, *(part for part in found if hasattr(part, "__dict__"))]


def _own(value: Any, master: torch.Tensor, *, rank: int, world_size: int) -> Any:
    """Return this process's shard of a tensor that was joined from all processes."""
    if not isinstance(value, torch.Tensor) or not value.dim() or value.numel() == master.numel():
        return value
    if value.numel() != world_size * master.numel():
        raise _misfit("It was split among another number of processes, and DeepSpeed's parts cannot be split again.")
    return value[rank * master.numel() : (rank + 1) * master.numel()]


def _misfit(reason: str) -> CheckpointError:
    return CheckpointError(
        "Cannot restore the optimizer's state of a checkpoint with strategy='deepspeed'.",
        reason,
        "Resume as the run was started, or start a new run from the checkpoint's weights.",
    )


def join_processes(*, device_type: str, backend: str | None) -> None:
    """Make DeepSpeed use the existing process group. Collective.

    Raises:
        StrategyError: DeepSpeed has selected another device type.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    device_name = get_accelerator().device_name()
    if device_name != device_type:
        raise StrategyError(
            f"strategy='deepspeed' was to run on {device_type!r}.",
            f"DeepSpeed chose {device_name!r} when it was imported.",
            f"Set the environment variable DS_ACCELERATOR={device_type} before the start.",
        )
    if device_name == "cpu":
        # Otherwise DeepSpeed compiles shared-memory collectives for minutes at the first start. Gloo is used instead.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def forget_groups() -> None:
    """Clear DeepSpeed's destroyed process groups, so that another launch does not find them."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    importlib.reload(groups)


class LastNorm:
    """The gradient norm of the last update, read from the engine when it is logged."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __float__(self) -> float:
        norm = self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)


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
