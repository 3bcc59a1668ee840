"""One write in the background; what a Trainer makes of it is in tests/unit/run/test_writing.py."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from hftrain.core.errors import CheckpointError
from hftrain.core.progress import Progress
from hftrain.extras.background import BackgroundWrite
from hftrain.preemption.board import Board
from hftrain.preemption.consensus import Consensus
from hftrain.strategies.single import SingleDeviceStrategy

DONE = Path("done")


class Run:
    """A main thread: what it calls at step ends, and what was settled; a group whose answers a test decides."""

    def __init__(self, all_true: Any = lambda flag: flag, work: Any = lambda group: DONE) -> None:
        self.pending: list[Any] = []
        self.settled: list[Any] = []
        self.consensus = Consensus(
            self.act, self.pending, group=SingleDeviceStrategy(), board=Board(), progress=Progress(), timeout_s=1.0
        )
        self.consensus.all_true = all_true  # type: ignore[method-assign]
        self.write = BackgroundWrite(
            "written 3", work, lambda path, error: self.settled.append((path, error)), consensus=self.consensus
        )

    def act(self) -> None:
        if self.consensus.due(1) == "written 3":
            self.write.finish()

    def end_step(self) -> None:
        for call in tuple(self.pending):
            call()


def test_end_is_settled_at_the_next_step() -> None:
    opened = threading.Event()

    def work(group: Any) -> Path:
        opened.wait(60)
        return DONE

    run = Run(work=work)
    run.end_step()
    assert run.settled == []
    assert not run.write.is_over
    opened.set()
    run.write.wait()
    run.end_step()
    assert run.settled == [(DONE, None)]
    assert run.pending == []
    run.end_step()
    assert len(run.settled) == 1


def test_what_is_finished_before_is_not_settled_again() -> None:
    run = Run()
    run.write.finish()
    assert run.settled == [(DONE, None)]
    run.end_step()
    assert len(run.settled) == 1


def lost(flag: bool) -> bool:
    raise CheckpointError("gone")


@pytest.mark.parametrize("all_true", [lambda flag: flag, lost])
def test_error_is_handed_over(all_true: Any) -> None:
    def fail(group: Any) -> Path:
        raise ArithmeticError

    run = Run(all_true, work=fail)
    run.write.finish()
    ((path, error),) = run.settled
    assert path is None
    assert isinstance(error, ArithmeticError)


def test_error_after_the_commit_ends_all_processes() -> None:
    run = Run(lambda flag: False)
    run.write.finish()
    assert isinstance(run.settled[0][1], CheckpointError)
    assert "Another process failed" in str(run.settled[0][1])


def test_end_without_an_agreement_is_an_error_at_the_next_step() -> None:
    run = Run(lost)
    run.write.wait()
    run.end_step()
    assert str(run.settled[0][1]) == "gone"


def test_thread_ends_with_the_work() -> None:
    run = Run()
    run.write.wait()
    assert run.write.is_over
