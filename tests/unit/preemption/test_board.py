"""Notes of a process that is alone; several processes: tests/distributed/test_ddp_strategy.py."""

from __future__ import annotations

import pytest

from hftrain import StrategyError
from hftrain.preemption.consensus import Board
from hftrain.strategies.ddp import DDPStrategy


def test_board_returns_what_was_posted_last_and_does_not_wait() -> None:
    board = Board()
    assert board.read("stop") is None
    board.post("stop", "5")
    board.post("stop", "7")
    assert board.read("stop") == "7"


def test_board_needs_a_launchers_store_for_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = DDPStrategy(use_cpu=True)
    strategy.world_size = 2
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(StrategyError, match="share no store"):
        strategy.make_board()
