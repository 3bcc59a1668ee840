"""Processes that agree without meeting: for work in the background, where no collective may run."""

from __future__ import annotations

import time

from hftrain.checkpoint.manager import Group
from hftrain.core.errors import CheckpointError
from hftrain.strategies.board import Board

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-3, 0.05


class BoardGroup:
    """Processes that agree through notes on a board; all must call the same methods in the same order.

    Notes of the same name are written over, so their number does not grow.

    Args:
        group: Who they are.
        board: Where they leave notes.
        timeout_s: How long one waits for the others.

    Units:
        timeout_s: seconds.
    """

    def __init__(self, group: Group, board: Board, *, timeout_s: float) -> None:
        self._board = board
        self._timeout_s = timeout_s
        self._turn = 0
        self.rank, self.world_size = group.rank, group.world_size
        self.is_main, self.is_local_main = group.is_main, group.is_local_main

    def barrier(self) -> None:
        """Wait for all."""
        self.largest(0)

    def all_true(self, flag: bool) -> bool:
        """Tell every process whether the flag is set on all."""
        return not self.largest(int(not flag))

    def largest(self, number: int) -> int:
        """Return the largest of all processes' numbers.

        Raises:
            CheckpointError: Another process gave none in time.
        """
        if self.world_size == 1:
            return number
        self._turn += 1
        self._board.post(f"rank {self.rank}", f"{self._turn} {number}")
        if self.rank:
            return self._wait_for("all")
        found = max(self._wait_for(f"rank {rank}") for rank in range(self.world_size))
        # Nobody's next note can replace this one before all have read it: rank 0 waits for all of them first.
        self._board.post("all", f"{self._turn} {found}")
        return found

    def _wait_for(self, key: str) -> int:
        deadline, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while time.monotonic() < deadline:
            turn, _, number = (self._board.read(key) or "").partition(" ")
            if turn == str(self._turn):
                return int(number)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise CheckpointError(
            "Processes were to agree on a save in the background.",
            f"There was no word from {'all' if key == 'all' else key} in {self._timeout_s:g} s.",
            "Look for its error; allow more time with ddp_timeout.",
        )
