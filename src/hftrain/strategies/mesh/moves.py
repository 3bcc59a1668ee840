"""How activations move between the ranks of one mesh dimension, and the random numbers of ranks that hold parts.

Activations are plain tensors. Each move names what a rank holds before and after it, through `DTensor`, whose backward
pass is the move's adjoint.
"""

from __future__ import annotations

import math
from typing import Any

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


# A large odd number, so that the seeds of different coordinates are far apart.
_STEP = 0x9E3779B97F4A7C15
_MAX = 2**63


class Apart:
    """Let the ranks of a region draw different numbers, and go on in step after it.

    The ranks have the same random state before `enter` and after `leave`. Between the two, each has one that follows
    from the shared state and its coordinate, so that a recomputed forward pass, which starts from the shared state,
    draws the same numbers again.

    Args:
        coordinate: This rank's place among those that share a state.
        device: The device on which the numbers are drawn.
    """

    def __init__(self, coordinate: int, device: torch.device) -> None:
        self._coordinate = coordinate
        self._device = device
        self._shared: list[torch.Tensor] = []
        self._seed: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether numbers are drawn apart now.

        The generator itself tells: recomputation that ends early, or an error, restores it without calling `leave`.
        """
        return bool(self._shared) and self._module().initial_seed() == self._seed

    def enter(self) -> None:
        """Draw different numbers from here on; regions may be nested."""
        # Drawn on the host: the same on all ranks, and without waiting for a device.
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        self._shared.append(self._module().get_rng_state())
        self._seed = seed_apart(seed, self._coordinate + 1)
        self._module().manual_seed(self._seed)

    def leave(self) -> None:
        """Draw the same numbers as the other ranks again."""
        self._module().set_rng_state(self._shared.pop())

    def open(self) -> None:
        """Enter the one region that `close` ends; nothing if numbers are drawn apart already."""
        if not self.is_open:
            self._shared.clear()  # of regions that were never left
            self.enter()

    def close(self) -> None:
        """End the region that `open` began; nothing if there is none."""
        if self.is_open:
            self.leave()

    def _module(self) -> Any:
        return torch.random if self._device.type == "cpu" else torch.get_device_module(self._device)


def seed_apart(seed: int, coordinate: int) -> int:
    """Return a seed for a coordinate, far from those of the others."""
    return (seed + coordinate * _STEP) % _MAX
