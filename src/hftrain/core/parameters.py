"""Parameters that are split: their shapes, and a process's part of them; and what models keep in private attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# The planner takes some 200 microseconds a tensor.
_blocks: WeakKeyDictionary[DeviceMesh, dict[Any, tuple[tuple[int, ...], tuple[int, ...]]]] = WeakKeyDictionary()


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the full shape of a parameter, even if ZeRO-3 has split it."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def is_split_by_zero(parameter: Any) -> bool:
    """Return whether ZeRO-3 has split a parameter."""
    return hasattr(parameter, "ds_id")


def is_partitioned(model: nn.Module) -> bool:
    """Return whether ZeRO-3 has split a model's parameters."""
    return any(map(is_split_by_zero, model.parameters()))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor that may be sharded (`DTensor`, which is not imported)."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def block_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where this process's block begins in the whole tensor, and its shape, according to torch's planner."""
    mesh = tensor.device_mesh
    blocks = _blocks.setdefault(mesh, {})
    key = (*(mesh.get_coordinate() or ()), tensor.shape, tensor.placements)
    if key not in blocks:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # half a second, for meshes alone

        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({"": tensor.detach()})
        (item,) = planner.create_local_plan().items
        chunk = item.tensor_data.chunk  # type: ignore[union-attr]
        blocks[key] = tuple(chunk.offsets), tuple(chunk.sizes)
    return blocks[key]


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a result of `state_dict`, tensors in the dtypes in which they were saved; mutates the optimizer.

    torch casts them to the dtype of their parameter. That rounds averages that an optimizer keeps in float32 beside
    16-bit parameters, as Adafactor does.
    """
    optimizer.load_state_dict(state)
    if not {"state", "param_groups"} <= state.keys():
        return  # a format of its own
    keys = [key for group in state["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, parameter in zip(keys, parameters, strict=True):
        entry = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(key, {}).items():
            current = entry.get(name)
            is_cast = isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor)
            if is_cast and current.dtype == parameter.dtype != value.dtype:
                entry[name] = torch.empty_like(current, dtype=value.dtype).copy_(value)


# -- what models hold under private names, which have no public way; each stands here only ----------------------------


def layer_hint(model: Any) -> list[str]:
    """Return the class names of a model's repeated layers, by the hint of transformers' models; empty without one."""
    return list(getattr(model, "_no_split_modules", None) or ())


def attention_of(model: Any, default: str = "") -> str:
    """Return how a transformers model computes attention (``"sdpa"``), or the default for another model."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", default))
