"""Parameters that are split, on the meta device or in files; and what models keep in private attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hftrain.core.types import StoredTensor

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


# By module, so that wrapping a model (with adapters) and casting it keep them.
_stored: WeakKeyDictionary[nn.Module, dict[str, StoredTensor]] = WeakKeyDictionary()

_running: list[Any] = []


@contextmanager
def weightless() -> Iterator[None]:
    """Put the parameters of modules on the meta device as they are made, so that none takes memory."""
    handle = register_module_parameter_registration_hook(lambda module, name, parameter: meta_twin(parameter))
    _running.append(handle)
    try:
        yield
    finally:
        _running.remove(handle)
        handle.remove()


def is_weightless() -> bool:
    """Return whether models are built without weights now, to be looked at and not to be trained."""
    return bool(_running)


def meta_twin(parameter: Any) -> Any:
    """Return a parameter on the meta device, the same for each of its homes."""
    if parameter is None or parameter.is_meta:
        return parameter
    meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    return vars(parameter).setdefault("_weightless", meta)


def attach_stored(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Note where the values of a model's tensors are stored, by their names."""
    for name, value in stored.items():
        home, _, leaf = name.rpartition(".")
        _stored.setdefault(model.get_submodule(home), {})[leaf] = value


def stored_in(model: nn.Module, *, take: bool = False) -> dict[str, StoredTensor]:
    """Return what `attach_stored` noted; with `take`, forget it."""
    of = _stored.pop if take else _stored.get
    modules = model.named_modules()
    return {f"{prefix}.{leaf}".lstrip("."): each for prefix, module in modules for leaf, each in of(module, {}).items()}
