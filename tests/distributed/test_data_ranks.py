"""Counts on processes of which pairs read the same samples: those of as many processes as there are pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.paired import PairedStrategy

from hftrain.core.errors import StrategyError
from hftrain.strategies.ranks import DataRanks

pytestmark = pytest.mark.distributed


def exchange() -> list[Any]:
    strategy = PairedStrategy(use_cpu=True)
    strategy.launch()
    with pytest.raises(StrategyError, match=r"2 data ranks.*does not exist yet.*launch\(\)"):
        DataRanks(strategy, rank=0, world_size=2).reduce(torch.zeros(1))
    data, own = strategy.data, torch.tensor([10.0 * strategy.rank])
    later, wait = data.reduce_later(own)
    wait()
    data.barrier()
    found = [
        *(data.rank, data.world_size, data.is_main, data.device == strategy.device),
        *(data.reduce(own, op).item() for op in ("sum", "mean", "max")),
        *(later.item(), data.gather(own).tolist(), data.gather_object(strategy.rank)),
        *(data.broadcast_object(strategy.rank, src) for src in (0, 1)),
        *(data.all_true(strategy.rank < 3), strategy.reduce(own).item()),
    ]
    strategy.close()
    return found


def test_exchanges_stay_among_the_processes_that_differ_in_data(run_distributed: Any) -> None:
    assert run_distributed(exchange, 4) == [
        [0, 2, True, True, 20.0, 10.0, 20.0, 20.0, [0.0, 20.0], [0, 2], 0, 2, True, 60.0],
        [0, 2, True, True, 40.0, 20.0, 30.0, 40.0, [10.0, 30.0], [1, 3], 1, 3, False, 60.0],
        [1, 2, False, True, 20.0, 10.0, 20.0, 20.0, [0.0, 20.0], [0, 2], 0, 2, True, 60.0],
        [1, 2, False, True, 40.0, 20.0, 30.0, 40.0, [10.0, 30.0], [1, 3], 1, 3, False, 60.0],
    ]
