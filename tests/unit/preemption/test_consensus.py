"""What one process is asked, and what several agree on: threads that share a board stand in for processes here.

Real processes: tests/guarantees/test_g7_signals.py, tests/distributed/test_saving_in_background.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from hftrain.core.errors import CheckpointError
from hftrain.core.state import Progress
from hftrain.preemption import consensus
from hftrain.preemption.consensus import SAVE, Board, Consensus


def make_consensus(
    rank: int = 0,
    world_size: int = 1,
    *,
    board: Board | None = None,
    act: Callable[[], None] = lambda: None,
    pending: list[Callable[[], None]] | None = None,
    progress: Progress | None = None,
    timeout_s: float = 60.0,
    every_s: float | None = None,
) -> Consensus:
    group: Any = SimpleNamespace(rank=rank, world_size=world_size, is_main=rank == 0, is_local_main=rank == 0)
    return Consensus(
        act,
        [] if pending is None else pending,
        group=group,
        board=board or Board(),
        progress=progress or Progress(),
        timeout_s=timeout_s,
        every_s=every_s,
    )


def test_a_stronger_request_does_not_swallow_one_that_it_does_not_include() -> None:
    pending: list[Callable[[], None]] = []
    alone = make_consensus(pending=pending)
    for what in ("written 1", SAVE, "written 2"):
        alone.ask(what)
    alone.withdraw("written 2")
    assert [alone.due(1), len(pending)] == [SAVE, 1]
    assert [alone.due(2), len(pending)] == ["written 1", 0]
    assert alone.due(3) is None


def test_the_clock_asks_for_a_save_each_time_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(consensus, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    pending: list[Callable[[], None]] = []
    alone = make_consensus(pending=pending, every_s=60.0)
    alone.start()
    [end_step] = pending
    found = []
    for clock.now_s in (50.0, 60.0, 119.0, 121.0):
        end_step()
        found.append(alone.due(1))
    clock.now_s = 150.0
    alone.note_save()
    for clock.now_s in (200.0, 210.0):
        end_step()
        found.append(alone.due(1))
    assert found == [None, SAVE, None, SAVE, None, SAVE]
    alone.close()
    assert pending == []


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


class Process:
    """What one process of a run has: its progress, and a thread that trains."""

    def __init__(self, board: Board, rank: int, world_size: int, *, num_steps: int, step_s: float) -> None:
        self.pending: list[Callable[[], None]] = []
        self.progress = Progress()
        self.done: list[tuple[str, int]] = []
        self.num_steps, self.step_s = num_steps, step_s
        self.consensus = make_consensus(
            rank, world_size, board=board, act=self.act, pending=self.pending, progress=self.progress
        )
        self.thread = threading.Thread(target=self.train)

    def act(self) -> None:
        step = self.progress.step
        asked = self.consensus.due(step) if step < self.num_steps else None
        if asked is not None:
            self.done.append((asked, step))

    def train(self) -> None:
        self.consensus.start()
        while self.progress.step < self.num_steps:
            time.sleep(self.step_s)
            self.progress.step += 1
            for call in tuple(self.pending):
                call()
            if any(asked == "SIGTERM" or asked == "SIGINT" for asked, _ in self.done):
                break
        self.consensus.close()


@contextmanager
def running(*paces_s: float, num_steps: int = 10**9) -> Iterator[list[Process]]:
    """Train in threads until a request stops them, however busy the machine is, or to the end of `num_steps`."""
    board = Board()
    made = [
        Process(board, rank, len(paces_s), num_steps=num_steps, step_s=pace_s) for rank, pace_s in enumerate(paces_s)
    ]
    for process in made:
        process.thread.start()
    try:
        yield made
    except BaseException:
        for process in made:
            process.num_steps = 0
        raise
    finally:
        for process in made:
            process.thread.join(30)
            assert not process.thread.is_alive()


@pytest.mark.parametrize("asker", [0, 1, 2])
def test_processes_at_different_steps_act_at_the_same_one(asker: int) -> None:
    with running(0.001, 0.004, 0.009) as made:
        wait_until(lambda: made[0].progress.step >= 5)
        made[asker].consensus.ask("SIGTERM")
    assert made[0].done == made[1].done == made[2].done
    ((asked, step),) = made[0].done
    assert asked == "SIGTERM"
    assert step >= 5


def test_requests_to_several_processes_are_not_lost() -> None:
    with running(0.002, 0.003) as made:
        made[0].consensus.ask(SAVE)
        made[1].consensus.ask("SIGINT")
        made[0].consensus.ask("SIGTERM")
    assert made[0].done == made[1].done
    assert made[0].done[-1][0] == "SIGTERM"


def test_a_save_lets_the_training_go_on_to_the_next_request() -> None:
    stops: list[str] = []
    with running(0.003, 0.004) as made:
        made[0].consensus.on_stop = lambda: stops.append("SIGTERM")
        made[1].consensus.ask(SAVE)
        wait_until(lambda: len(made[0].done) == 1)
        made[0].consensus.ask(SAVE)
        wait_until(lambda: len(made[1].done) == 2)
        assert not stops
        made[1].consensus.ask("SIGTERM")
    assert made[0].done == made[1].done
    assert [asked for asked, _ in made[0].done] == [SAVE, SAVE, *stops]


def test_all_settle_a_write_at_one_boundary_after_the_last_has_asked_or_later() -> None:
    with running(0.002, 0.005) as made:
        made[0].consensus.ask("written 3")
        time.sleep(0.05)
        asked_at = made[1].progress.step
        made[1].consensus.ask("written 3")
        wait_until(lambda: bool(made[1].done) and made[1].done[-1][1] >= asked_at)
        made[0].consensus.ask("SIGTERM")
    assert made[0].done == made[1].done
    # A process that asks after the boundary has its say again, which then finds nothing to settle.
    settled = [asked for asked, _ in made[0].done]
    assert settled in (["written 3", "SIGTERM"], ["written 3", "written 3", "SIGTERM"])


def test_a_request_withdrawn_while_all_look_for_a_boundary_does_nothing() -> None:
    board, pending = Board(), []  # type: ignore[var-annotated]
    made = [make_consensus(rank, 2, board=board, pending=pending if rank else []) for rank in range(2)]
    made[0].ask("written 3")
    made[0].start()
    wait_until(lambda: board.read("round/0") is not None)
    made[0].withdraw("written 3")
    made[1].start()
    wait_until(lambda: board.read("round") is not None)
    assert [each.due(1) for each in made] == ["written 3"] * 2
    # The round was opened for it, so all are told; a round opened for nothing tells nothing.
    board.post("opened", "1")
    wait_until(lambda: board.read("round") == "[1, [null, 1]]")
    assert [each.due(1) for each in made] == [None] * 2
    assert pending == []
    for each in made:
        each.close()


def test_a_stop_that_was_agreed_on_and_not_handed_out_is_left_over() -> None:
    board, progress = Board(), Progress(step=9)
    made = [make_consensus(rank, 2, board=board, progress=progress) for rank in range(2)]
    for each in made:
        each.start()
    made[1].ask("SIGTERM")
    wait_until(lambda: made[0].unhandled_stop() == "SIGTERM")
    assert made[0].due(10) == "SIGTERM"
    assert made[0].unhandled_stop() is None
    for each in made:
        each.close()
    assert made[1].unhandled_stop() == "SIGTERM"


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the end of the process in place of ending it, which would end pytest."""
    statuses: list[int] = []

    def exit_(status: int) -> None:
        statuses.append(status)

    monkeypatch.setattr(consensus, "end_process", exit_)
    return statuses


def make_silent_pair(monkeypatch: pytest.MonkeyPatch, board: Board) -> tuple[Consensus, list[Any]]:
    """Return the first of two processes; the second never says anything."""
    monkeypatch.setattr(consensus, "_ANSWER_S", 0.1)
    pending: list[Any] = []
    first = make_consensus(0, 2, board=board, pending=pending)
    first.start()
    return first, pending


def test_a_stop_ends_the_process_at_once_if_another_has_failed(
    monkeypatch: pytest.MonkeyPatch, exits: list[int]
) -> None:
    board = Board()
    board.post("left/1", "failed")
    first, _ = make_silent_pair(monkeypatch, board)
    first.ask("SIGTERM")
    wait_until(lambda: bool(exits))
    assert set(exits) == {143}
    first.close()


def test_a_stop_ends_the_process_at_once_if_another_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, exits: list[int]
) -> None:
    first, _ = make_silent_pair(monkeypatch, Board())
    first.ask("SIGINT")
    wait_until(lambda: bool(exits))
    assert set(exits) == {130}
    first.close()


def test_a_save_that_another_process_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, pending = make_silent_pair(monkeypatch, Board())
    assert first.ask(SAVE)
    wait_until(lambda: "another process does not respond" in caplog.text)
    wait_until(lambda: not pending)
    assert first.due(1) is None
    first.close()


def in_threads(members: list[Consensus], work: Callable[[Consensus], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(work, members))


def make_group(count: int, timeout_s: float = 60.0) -> list[Consensus]:
    board = Board()
    return [make_consensus(rank, count, board=board, timeout_s=timeout_s) for rank in range(count)]


def test_a_save_and_a_request_are_agreed_on_at_the_same_time_and_after_the_run() -> None:
    with running(0.003, 0.004) as made:
        made[1].consensus.ask("SIGTERM")
        members = [each.consensus for each in made]
        assert (
            in_threads(members, lambda group: [group.all_true(turn != 7) for turn in range(9)])
            == [[turn != 7 for turn in range(9)]] * 2
        )
    assert made[0].done == made[1].done != []
    assert in_threads(members, lambda group: group.all_true(True)) == [True, True]


def test_silence_of_another_process_is_an_error() -> None:
    main, other = make_group(2, timeout_s=0.05)
    with pytest.raises(CheckpointError, match="no word from rank 1"):
        main.all_true(True)
    with pytest.raises(CheckpointError, match="no word from rank 0"):
        other.all_true(True)
