"""Plain modules on two tensor ranks: the cheap check that every torch passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hftrain.core.types import PrecisionPolicy
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.distributed


def train(*, name: str) -> list[float]:
    """Return the norms and the last outputs of three clipped updates."""
    torch.manual_seed(0)
    double = PrecisionPolicy(
        name="64", param_dtype=torch.float64, compute_dtype=torch.float64, reduce_dtype=torch.float64
    )
    options = {"plan": {"0": "colwise", "2": "rowwise"}} if name == "tp" else {}
    strategy: Any = create_strategy(name, use_cpu=True, **options)
    strategy.launch()
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    inputs = torch.randn(5, 6, dtype=torch.float64)
    model, optimizer = strategy.setup(plain, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1), double)
    found = []
    for _ in range(3):
        model(inputs).square().sum().backward()
        found.append(float(strategy.clip_grad_norm(model.parameters(), 0.001)))
        optimizer.step()
        optimizer.zero_grad()
    found += model(inputs).flatten().tolist()
    strategy.close()
    return found


def test_tensor_ranks_take_the_clipped_updates_of_one_process(run_distributed: Callable[..., list[Any]]) -> None:
    expected = train(name="single")
    for found in run_distributed(train, num_processes=2, name="tp"):
        assert found == pytest.approx(expected, rel=0, abs=1e-11)
