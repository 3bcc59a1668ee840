"""Processes that agree through a board, played by threads; real ones are in tests/distributed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from hftrain.checkpoint.agreement import BoardGroup
from hftrain.core.errors import CheckpointError
from hftrain.strategies.board import Board


def make_groups(count: int, timeout_s: float = 60.0) -> list[BoardGroup]:
    board = Board()
    members: list[Any] = [
        SimpleNamespace(rank=rank, world_size=count, is_main=rank == 0, is_local_main=rank == 0)
        for rank in range(count)
    ]
    return [BoardGroup(member, board, timeout_s=timeout_s) for member in members]


def in_threads(groups: list[BoardGroup], work: Any) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


def test_group_of_one_asks_nobody() -> None:
    (alone,) = make_groups(1)
    alone.barrier()
    assert alone.all_true(True)
    assert not alone.all_true(False)
    assert alone.largest(7) == 7


def test_all_agree_on_the_same_answer_each_time() -> None:
    def work(group: BoardGroup) -> list[Any]:
        answers: list[Any] = []
        for turn in range(20):
            time.sleep(0.002 * ((group.rank + turn) % 3))
            answers += [group.largest(10 * turn + group.rank), group.all_true(turn % 4 != group.rank)]
        return answers

    expected = [answer for turn in range(20) for answer in (10 * turn + 2, turn % 4 == 3)]
    assert in_threads(make_groups(3), work) == [expected] * 3


def test_barrier_waits_for_the_last() -> None:
    arrived = threading.Event()

    def work(group: BoardGroup) -> bool:
        if group.rank == 1:
            time.sleep(0.1)
            arrived.set()
        group.barrier()
        return arrived.is_set()

    assert in_threads(make_groups(2), work) == [True, True]


def test_silence_of_another_process_is_an_error() -> None:
    main, other = make_groups(2, timeout_s=0.05)
    with pytest.raises(CheckpointError, match=r"no word from rank 1 in 0\.05 s"):
        main.barrier()
    with pytest.raises(CheckpointError, match="no word from all"):
        other.barrier()
