"""Processes that meet in a store in which others have met before; here they are threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hftrain import StrategyError
from hftrain.strategies.distributed import fresh_place


def meet(store: Store, *, world_size: int, order: list[int] | None = None) -> list[Store]:
    """Let all ranks find their place, beginning in an order."""
    with ThreadPoolExecutor(world_size) as pool:
        found = {
            rank: pool.submit(fresh_place, store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
            for rank in order or range(world_size)
        }
        return [found[rank].result() for rank in range(world_size)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_processes_that_are_started_again_see_nothing_of_those_before(order: list[int]) -> None:
    store = dist.HashStore()
    for attempt in range(4):
        places = meet(store, world_size=3, order=order)
        assert not any(place.check(["failed"]) for place in places)
        places[1].set("failed", str(attempt))
        assert [place.get("failed") for place in places] == [str(attempt).encode()] * 3


def test_process_that_never_came_before_is_waited_for() -> None:
    store = dist.HashStore()
    with pytest.raises(StrategyError, match=r"Rank 0 of 2 waited .* within 0.05 s"):
        fresh_place(store, rank=0, world_size=2, timeout=timedelta(seconds=0.05))
    one, other = meet(store, world_size=2)
    one.set("there", "1")
    assert other.check(["there"])
