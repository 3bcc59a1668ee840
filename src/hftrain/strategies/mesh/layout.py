"""The sizes of a mesh, who stands where on it, and torch's device meshes for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hftrain.core.errors import ConfigError

# How users name the dimensions, the slowest first: ranks that differ in the last one are neighbours, on one machine if
# possible.
ARGUMENTS = {"pp": "pp_size", "dp_replicate": "dp_replicate", "dp_shard": "dp_shard", "cp": "cp_size", "tp": "tp_size"}
DIMS = tuple(ARGUMENTS)


class Meshes(NamedTuple):
    """The device meshes of a layout. `parameters` holds every parameter; `samples` says who reads what.

    Args:
        parameters: Dimensions ``pp, replicate, shard, tp``; context ranks share parameters as data ranks do.
        samples: Dimensions ``pp, data, cp, tp``.
    """

    parameters: DeviceMesh
    samples: DeviceMesh


# What the strategies of these processes have made; first the group of all processes.
_MESHES: dict[tuple[Any, Layout, str], Meshes] = {}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of a mesh: pipeline stages, replicas, shards, context ranks and tensor ranks.

    Args:
        pp: Stages of the pipeline.
        dp_replicate: Copies of the sharded model.
        dp_shard: Data ranks that share one copy's parameters, gradients and optimizer state.
        cp: Ranks that share each sequence.
        tp: Ranks that share each layer.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by dimension, the slowest first."""
        return {dim: getattr(self, dim) for dim in DIMS}

    @property
    def size(self) -> int:
        """The number of processes."""
        return math.prod(self.sizes.values())

    @property
    def data_size(self) -> int:
        """The number of processes that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_size(self) -> int:
        """The number of processes over which a parameter of one stage and tensor rank is sharded."""
        return self.dp_shard * self.cp

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return a process's place in each dimension.

        Example:
            >>> Layout(dp_shard=2, tp=2).coordinate(3)
            {'pp': 0, 'dp_replicate': 0, 'dp_shard': 1, 'cp': 0, 'tp': 1}
        """
        indices = numpy.unravel_index(rank, tuple(self.sizes.values()))
        return {dim: int(index) for dim, index in zip(DIMS, indices, strict=True)}

    def meshes(self, device_type: str) -> Meshes:
        """Make the device meshes, or return those that a strategy of these processes has made. Collective.

        Each mesh has groups of its own, whose connections last as long as the processes' group.
        """
        key = (dist.group.WORLD, self, device_type)
        if key not in _MESHES:
            model = {"pp": self.pp, "replicate": self.dp_replicate, "shard": self.shard_size, "tp": self.tp}
            data = {"pp": self.pp, "data": self.data_size, "cp": self.cp, "tp": self.tp}
            pair = (init_device_mesh(device_type, tuple(x.values()), mesh_dim_names=tuple(x)) for x in (model, data))
            _MESHES[key] = Meshes(*pair)
        return _MESHES[key]

    def __str__(self) -> str:
        shown = [f"{dim} {size}" for dim, size in self.sizes.items() if size > 1]
        return " x ".join(shown) or "one process"


def forget_meshes() -> None:
    """Let the meshes of a group that is destroyed go, and with them its connections."""
    for key in [key for key in _MESHES if key[0] is not dist.group.WORLD]:
        del _MESHES[key]


def layout_of(
    world_size: int, given: Mapping[str, Any], *, uses: Sequence[str] = (), machine_size: int | None = None
) -> Layout:
    """Return the layout for a number of processes.

    Args:
        given: Sizes by dimension; None where none was named.
        uses: The dimensions that the strategy's name promises. The one without a size takes the processes that are
            left; what is left without such a dimension are shards.
        machine_size: The number of processes of one machine, which shards fill when replicas are used, too.

    Raises:
        ConfigError: The sizes do not fit the processes, or do not say how to share them out.

    Example:
        >>> str(layout_of(8, {"tp": 2}, uses=("dp_shard", "tp")))
        'dp_shard 4 x tp 2'
    """
    sizes = {dim: given[dim] for dim in DIMS if given.get(dim) is not None}
    for dim, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            remedy = "Use 1 or more. `hftrain plan` proposes sizes for a script."
            raise _refusal(given, f"{ARGUMENTS[dim]} is not a number of processes.", remedy)
    open_dims = [dim for dim in uses if dim not in sizes]
    if {"dp_replicate", "dp_shard"} <= set(open_dims):
        inner = math.prod(sizes.get(dim, 1) or 1 for dim in ("pp", "cp", "tp"))
        sizes["dp_shard"] = max((machine_size or world_size) // inner, 1)
        open_dims.remove("dp_shard")
    product = math.prod(size or 1 for size in sizes.values())
    if len(open_dims) > 1 and product < world_size:
        names = ", ".join(f"{ARGUMENTS[dim]}=..." for dim in open_dims[1:])
        remedy = f"Say it: strategy=MeshStrategy({names}), from hftrain.strategies; other processes share out the rest."
        raise _refusal(given, f"{world_size} processes can be shared out in several ways.", remedy)
    fill = open_dims[0] if open_dims else "dp_shard"
    if world_size % product or (fill in sizes and product != world_size):
        reason = f"They describe {product} processes, and the launcher started {world_size}."
        raise _refusal(given, reason, "Start that many (torchrun --nproc_per_node), or change the sizes.")
    sizes.setdefault(fill, world_size // product)
    return Layout(**{dim: size or 1 for dim, size in sizes.items()})


def _refusal(given: Mapping[str, Any], reason: str, remedy: str) -> ConfigError:
    shown = {ARGUMENTS[dim]: size for dim, size in given.items() if size is not None}
    return ConfigError("Cannot use these sizes of a mesh.", reason, remedy, **shown)
