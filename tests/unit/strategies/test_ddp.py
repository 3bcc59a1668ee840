"""DDP on one process: wrapping. Several processes: tests/distributed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hftrain.core.errors import ConfigError
from hftrain.precision.registry import precisions
from hftrain.strategies.ddp import DDPStrategy
from hftrain.strategies.registry import create_strategy

POLICY = precisions.create("fp32").policy


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    assert not isinstance(model, DistributedDataParallel)
    return torch.optim.SGD(model.parameters())


@pytest.fixture
def strategy() -> Iterator[DDPStrategy]:
    strategy = DDPStrategy(use_cpu=True)
    strategy.launch()
    yield strategy
    strategy.close()


def test_reducer_is_gone_before_its_group_is_destroyed(strategy: DDPStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, _ = strategy.setup(nn.Linear(2, 2), make_optimizer, POLICY)
    wrapped(torch.ones(1, 2)).sum().backward()
    reducer = weakref.ref(wrapped.reducer)
    alive: list[bool] = []
    destroy = torch.distributed.destroy_process_group
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda: (alive.append(reducer() is not None), destroy())
    )
    strategy.close()
    assert alive == [False]
    assert wrapped.module(torch.ones(1, 2)).shape == (1, 2)


def test_wrapper_in_a_group_of_the_users_stays_usable(strategy: DDPStrategy) -> None:
    joined = DDPStrategy(use_cpu=True)
    joined.launch()  # into the fixture's group
    wrapped, _ = joined.setup(nn.Linear(2, 2), make_optimizer, POLICY)
    joined.close()
    wrapped(torch.ones(1, 2)).sum().backward()


def test_frozen_model_is_refused(strategy: DDPStrategy) -> None:
    with pytest.raises(ConfigError, match="none of its parameters requires a gradient"):
        strategy.setup(nn.Linear(2, 2).requires_grad_(False), make_optimizer, POLICY)


def test_options_reach_ddp(strategy: DDPStrategy) -> None:
    chosen = create_strategy(
        "ddp_find_unused", use_cpu=True, bucket_cap_mb=1, broadcast_buffers=False, gradient_as_bucket_view=True
    )
    chosen.launch()  # into the fixture's group
    wrapped, _ = chosen.setup(nn.Linear(2, 2), make_optimizer, POLICY)
    assert wrapped.find_unused_parameters
    assert wrapped.bucket_bytes_cap == 1024**2
    assert not wrapped.broadcast_buffers
    assert wrapped.gradient_as_bucket_view


def test_mps_is_refused() -> None:
    assert "MPS" in DDPStrategy.refuses(POLICY, "mps")
    assert DDPStrategy.refuses(POLICY, "cuda") is None
