"""How activations move between the ranks of one mesh dimension, with the gradients that belong to each move.

Activations are plain tensors. Each move names what a rank holds before and after it, through `DTensor`, whose backward
pass is the move's adjoint.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


def enter(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return `x`, which all ranks hold, for computations that differ by rank; gradients are summed over the ranks."""
    return _move(x, mesh, Replicate(), Replicate(), grad=Partial())


def leave(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the sum of all ranks' `x` to all of them; the gradient, which they share, passes."""
    return _move(x, mesh, Partial(), Replicate(), grad=Replicate())


def split(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Return this rank's part of `x`, which all ranks hold; gradients are put together."""
    return _move(x, mesh, Replicate(), Shard(dim % x.dim()), grad=None)


def join(x: torch.Tensor, mesh: DeviceMesh, dim: int, *, sums: bool) -> torch.Tensor:
    """Return the parts of all ranks, put together, to all of them.

    Args:
        x: This rank's part, as long on all ranks.
        sums: Whether the ranks use the result differently, or each for a loss of its own: gradients are summed before
            they are split. Otherwise all have the same gradient, which is only split.
    """
    dim %= x.dim()
    shape = list(x.shape)
    shape[dim] *= mesh.size()
    return _move(x, mesh, Shard(dim), Replicate(), grad=Partial() if sums else Replicate(), shape=shape)


def scatter_sum(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Return this rank's part of the sum of all ranks' `x`; gradients are put together."""
    return _move(x, mesh, Partial(), Shard(dim % x.dim()), grad=None)


def exchange(x: torch.Tensor, mesh: DeviceMesh, have: int, want: int) -> torch.Tensor:
    """Return this rank's part along dimension `want`; `x` is its part along `have`, as long on all ranks."""
    shape = list(x.shape)
    shape[have] *= mesh.size()
    return _move(x, mesh, Shard(have), Shard(want), grad=None, shape=shape)


def _move(
    x: torch.Tensor,
    mesh: DeviceMesh,
    source: Placement,
    target: Placement,
    *,
    grad: Placement | None,
    shape: list[int] | None = None,
) -> torch.Tensor:
    # torch infers a wrong shape from parts of different lengths.
    size = torch.Size(shape or x.shape)
    stride = tuple(math.prod(size[place + 1 :]) for place in range(len(size)))
    tensor = DTensor.from_local(x, mesh, [source], run_check=False, shape=size, stride=stride)
    grads = None if grad is None else [grad]
    local: torch.Tensor = tensor.redistribute(placements=[target]).to_local(grad_placements=grads)
    return local
