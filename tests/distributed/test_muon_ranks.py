"""Muon on several processes: matrices that are split have the updates of whole ones, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hftrain import Muon

pytestmark = pytest.mark.distributed

SHAPES = ((5, 3), (1, 4), (8, 2), (2, 7), (6, 6))


def updated(*, is_split: bool, num: int = 3) -> list[list[float]]:
    """Return matrices after some updates, the same for all ways to split them."""
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
    gradients = [[torch.randn(shape) for shape in SHAPES] for _ in range(num)]
    if is_split:
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = Muon(model.parameters(), targets=list(model.parameters()), lr=0.1, weight_decay=0.1)
    for each in gradients:
        for parameter, gradient in zip(model.parameters(), each, strict=True):
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            parameter.grad = gradient if mesh is None else distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer.step()
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [value.flatten().tolist() for value in whole]


def check_split(folder: str) -> bool:
    """Compare with whole matrices, of which the processes have rows or columns."""
    torch.distributed.init_process_group("gloo")
    assert updated(is_split=True) == updated(is_split=False)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    values, gradient = torch.randn(4, 6), torch.randn(4, 6)
    whole, split = nn.Parameter(values.clone()), nn.Parameter(distribute_tensor(values, mesh, [Shard(1)]))
    whole.grad, split.grad = gradient, distribute_tensor(gradient, mesh, [Shard(1)])
    for matrix in (whole, split):
        Muon([matrix], targets=[matrix]).step()
    is_same = torch.equal(split.full_tensor(), whole)  # type: ignore[attr-defined]
    torch.distributed.destroy_process_group()
    return is_same


@pytest.mark.parametrize("num_processes", [2, 3])
def test_split_matrices_get_the_bits_of_whole_ones(tmp_path: Path, run_distributed: Any, num_processes: int) -> None:
    assert all(run_distributed(check_split, num_processes=num_processes, folder=str(tmp_path)))
