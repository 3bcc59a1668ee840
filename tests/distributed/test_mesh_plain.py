"""Plain modules on two tensor ranks: the cheap check that every torch passes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from hftrain.core.types import PrecisionPolicy
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.distributed


DOUBLE = PrecisionPolicy(name="64", **dict.fromkeys(("param_dtype", "compute_dtype", "reduce_dtype"), torch.float64))


class Twice(nn.Linear):
    """A layer that computes with its weight under another name."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.table = self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.table, self.bias)


class Attends(nn.MultiheadAttention):
    """Attention, which reads the weight of its last layer without calling it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


def train(*, name: str) -> list[float]:
    """Return the norms and the last outputs of three clipped updates."""
    torch.manual_seed(0)
    options = {"plan": {"0": "colwise", "2": "rowwise"}} if name == "tp" else {}
    strategy: Any = create_strategy(name, use_cpu=True, **options)
    strategy.launch()
    # ELU changes the output of a row-wise layer in place.
    plain = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.ELU(inplace=True), Twice(3), Attends(3, 1)
    ).double()
    inputs = torch.randn(5, 6, dtype=torch.float64)
    model, optimizer = strategy.setup(plain, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1), DOUBLE)
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


def groups_of_two() -> list[str]:
    """Return the groups of two strategies that one process uses, one after the other."""
    first = create_strategy("tp", use_cpu=True)
    first.launch()
    second = create_strategy("tp", use_cpu=True)
    second.launch()
    return [each.data.group.group_name for each in (first, second)]


def threads() -> list[int]:
    """Return the number of this process's threads after each of three strategies."""
    found = []
    for _ in range(3):
        strategy = create_strategy("tp", use_cpu=True)
        strategy.launch()
        strategy.close()
        del strategy
        gc.collect()
        found.append(psutil.Process().num_threads())
    return found


def test_closed_strategies_leave_no_connections(run_distributed: Callable[..., list[Any]]) -> None:
    for first, second, third in run_distributed(threads, num_processes=2):
        assert first == second == third


def test_strategies_of_one_process_share_their_groups(run_distributed: Callable[..., list[Any]]) -> None:
    for first, second in run_distributed(groups_of_two, num_processes=2):
        assert first == second


class Shifted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("shift", torch.ones(2))


def saved() -> list[str]:
    """Return what this process's part of a checkpoint holds."""
    strategy = create_strategy("pp", use_cpu=True)
    strategy.launch()
    model, _ = strategy.setup(nn.Sequential(Shifted(), Shifted()), lambda m: torch.optim.SGD(m.parameters()), DOUBLE)
    names = [*(strategy.model_shards(model) or ())]
    strategy.close()
    return names


def test_stages_save_their_buffers(run_distributed: Callable[..., list[Any]]) -> None:
    first, second = run_distributed(saved, num_processes=2)
    assert first == ["0.weight", "0.bias", "0.shift"]
    assert second == ["1.weight", "1.bias", "1.shift"]


class Told(nn.Module):
    """A model that also returns what a part before its layers computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = early = self.first(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"early": early + 1, "logits": self.last(hidden)}


def told() -> list[Any]:
    """Evaluate on two stages; return the names of the outputs of each batch, and the warnings."""
    strategy: Any = create_strategy("pp", use_cpu=True)
    strategy.launch()
    model, _ = strategy.setup(Told().double(), lambda m: torch.optim.SGD(m.parameters()), DOUBLE)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = [sorted(model.eval()(torch.ones(size, 4, dtype=torch.float64))) for size in (2, 4, 2)]
    strategy.close()
    return [names, [str(each.message) for each in caught if "left out" in str(each.message)]]


def test_outputs_of_the_first_stage_are_left_out_and_named(run_distributed: Callable[..., list[Any]]) -> None:
    (names, silent), (same, said) = run_distributed(told, num_processes=2)
    assert names == same == [["logits"]] * 3
    assert silent == []
    assert len(said) == 1
    assert "left out: early" in said[0]
