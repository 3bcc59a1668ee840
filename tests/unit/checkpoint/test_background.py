"""One write in the background; what a Trainer makes of it is in tests/unit/trainer/test_writing.py."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from hftrain.checkpoint.background import BackgroundWrite
from hftrain.core.errors import CheckpointError

DONE = Path("done")


class Group:
    """A group whose answers a test decides."""

    rank, world_size, is_main, is_local_main = 0, 1, True, True

    def __init__(self, world_size: int = 1, largest: Any = None, all_true: bool = True) -> None:
        self.world_size = world_size
        self._largest = largest or (lambda number: number)
        self._all_true = all_true

    def barrier(self) -> None:
        """Not used."""

    def all_true(self, flag: bool) -> bool:
        return flag and self._all_true

    def largest(self, number: int) -> int:
        return int(self._largest(number))


class Run:
    """A main thread: its step, what it calls at step ends, and what was settled."""

    def __init__(self, group: Group, work: Any = lambda group: DONE) -> None:
        self.step = 3
        self.pending: list[Any] = []
        self.settled: list[Any] = []
        self.write = BackgroundWrite(
            work,
            lambda path, error: self.settled.append((path, error)),
            group=group,
            read_step=lambda: self.step,
            pending=self.pending,
        )

    def end_step(self) -> None:
        self.step += 1
        for call in tuple(self.pending):
            call()


def test_end_is_settled_at_the_next_step() -> None:
    opened = threading.Event()

    def work(group: Any) -> Path:
        opened.wait(60)
        return DONE

    run = Run(Group(), work)
    run.end_step()
    assert run.settled == []
    assert not run.write.is_over
    opened.set()
    run.write.wait()
    run.end_step()
    assert run.settled == [(DONE, None)]
    assert run.pending == []
    run.write.finish()
    assert len(run.settled) == 1


def test_end_is_settled_at_the_step_that_all_can_reach() -> None:
    # Another process is two steps ahead.
    run = Run(Group(2, largest=lambda number: number + 2))
    run.write.wait()
    for expected in (0, 0, 1):
        run.end_step()
        assert len(run.settled) == expected
    assert run.step == 6


def test_finish_settles_at_once() -> None:
    run = Run(Group(2, largest=lambda number: number + 2))
    run.write.finish()
    assert run.settled == [(DONE, None)]
    run.end_step()
    assert len(run.settled) == 1


def test_error_is_handed_over() -> None:
    def fail(group: Any) -> Path:
        raise ArithmeticError

    run = Run(Group(), fail)
    run.write.finish()
    ((path, error),) = run.settled
    assert path is None
    assert isinstance(error, ArithmeticError)


def test_error_after_the_commit_ends_all_processes() -> None:
    run = Run(Group(2, all_true=False))
    run.write.finish()
    assert isinstance(run.settled[0][1], CheckpointError)
    assert "Another process failed" in str(run.settled[0][1])


def test_end_without_an_agreement_is_an_error_at_the_next_step() -> None:
    def lost(number: int) -> int:
        raise CheckpointError("gone")

    run = Run(Group(2, largest=lost))
    run.write.wait()
    run.end_step()
    assert str(run.settled[0][1]) == "gone"


@pytest.mark.parametrize("world_size", [1, 2])
def test_thread_ends_with_the_work(world_size: int) -> None:
    run = Run(Group(world_size))
    run.write.wait()
    assert run.write.is_over
