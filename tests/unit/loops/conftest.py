"""Several ranks in one process: a thread each, so that collectives can be tested on hundreds of random cases.

Real processes are in tests/distributed; here only the transport is another.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch


class ThreadGroup:
    """The collectives of one rank, by a table that all threads share; strict as those of a strategy."""

    device = torch.device("cpu")

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = len(table)
        self._table = table
        self._barrier = barrier

    def _exchange(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._barrier.wait()
        values = list(self._table)
        self._barrier.wait()
        return values

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(tensor)
        kinds = {(part.dtype, part.shape[1:]) for part in parts if len(part)}
        assert len(kinds) <= 1, f"ranks gather different kinds of tensors: {kinds}"
        return torch.cat([part for part in parts if len(part)] or parts[:1])

    def gather_object(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._exchange(json.dumps(value))]

    def all_true(self, flag: bool) -> bool:
        return all(self._exchange(flag))

    def reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        stacked = torch.stack(self._exchange(tensor))
        return {"sum": stacked.sum, "mean": stacked.mean, "max": stacked.amax}[op](0)


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """Return ``run(function, world_size)``, which calls ``function(group)`` in every rank and returns the answers."""

    def run(function: Callable[[ThreadGroup], Any], world_size: int) -> list[Any]:
        table, barrier = [None] * world_size, threading.Barrier(world_size, timeout=20)

        def run_rank(rank: int) -> Any:
            try:
                return function(ThreadGroup(rank, table, barrier))
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(world_size) as pool:
            futures = [pool.submit(run_rank, rank) for rank in range(world_size)]
        errors = [future.exception() for future in futures]
        # The first cause, not the barrier that it broke for the others.
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    return run
