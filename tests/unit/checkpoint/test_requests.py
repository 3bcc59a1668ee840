"""Requests of one process, and of several: threads that share a board stand in for processes here.

Real processes: tests/guarantees/test_g7_signals.py.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hftrain.checkpoint import requests
from hftrain.checkpoint.requests import SAVE, SharedRequests, StepRequests, strongest
from hftrain.core.progress import Progress
from hftrain.strategies.board import Board


def test_the_strongest_request_includes_the_others() -> None:
    for order in itertools.permutations([SAVE, "SIGINT", "SIGTERM", None]):
        assert strongest(order) == "SIGTERM"
    assert strongest([None, SAVE]) == SAVE
    assert strongest([]) is None


def test_a_request_is_handed_out_once_at_the_next_boundary() -> None:
    pending: list[Callable[[], None]] = []
    alone = StepRequests(lambda: None, pending)
    assert alone.ask(SAVE)
    assert alone.ask("SIGINT")
    assert len(pending) == 1
    assert alone.left_over() == "SIGINT"
    assert alone.due(3) == "SIGINT"
    assert pending == []
    assert alone.left_over() is None
    assert alone.due(4) is None


def test_the_clock_asks_for_a_save_each_time_it_is_due() -> None:
    pending: list[Callable[[], None]] = []
    alone = StepRequests(lambda: None, pending, every_s=0.05)
    alone.start()
    try:
        for _ in range(3):
            wait_until(lambda: bool(pending))
            assert alone.due(1) == SAVE
        alone.note_save()
        assert pending == []
    finally:
        alone.close()
    time.sleep(0.1)
    assert pending == []


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
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
        self.requests = SharedRequests(
            self.heed, self.pending, board=board, rank=rank, world_size=world_size, progress=self.progress
        )
        self.thread = threading.Thread(target=self.train)

    def heed(self) -> None:
        step = self.progress.step
        asked = self.requests.due(step) if step < self.num_steps else None
        if asked is not None:
            self.done.append((asked, step))

    def train(self) -> None:
        self.requests.start()
        for _ in range(self.num_steps):
            time.sleep(self.step_s)
            self.progress.step += 1
            for call in tuple(self.pending):
                call()
            if any(asked != SAVE for asked, _ in self.done):
                break
        self.requests.close()


@contextmanager
def running(*paces_s: float, num_steps: int = 400) -> Iterator[list[Process]]:
    board = Board()
    made = [
        Process(board, rank, len(paces_s), num_steps=num_steps, step_s=pace_s) for rank, pace_s in enumerate(paces_s)
    ]
    for process in made:
        process.thread.start()
    try:
        yield made
    finally:
        for process in made:
            process.thread.join(30)
            assert not process.thread.is_alive()


@pytest.mark.parametrize("asker", [0, 1, 2])
def test_processes_at_different_steps_act_at_the_same_one(asker: int) -> None:
    with running(0.001, 0.004, 0.009) as made:
        time.sleep(0.05)
        made[asker].requests.ask("SIGTERM")
    assert made[0].done == made[1].done == made[2].done
    ((asked, step),) = made[0].done
    assert asked == "SIGTERM"
    assert step >= 5


def test_requests_to_several_processes_are_not_lost() -> None:
    with running(0.002, 0.003) as made:
        made[0].requests.ask(SAVE)
        made[1].requests.ask("SIGINT")
        made[0].requests.ask("SIGTERM")
    assert made[0].done == made[1].done
    assert made[0].done[-1][0] == "SIGTERM"


def test_a_save_lets_the_training_go_on_to_the_next_request() -> None:
    with running(0.003, 0.004, num_steps=2000) as made:
        made[1].requests.ask(SAVE)
        wait_until(lambda: len(made[0].done) == 1)
        made[0].requests.ask(SAVE)
        wait_until(lambda: len(made[1].done) == 2)
        made[1].requests.ask("SIGTERM")
    assert made[0].done == made[1].done
    assert [asked for asked, _ in made[0].done] == [SAVE, SAVE, "SIGTERM"]


def test_a_run_that_ends_before_the_request_is_agreed_on_just_ends() -> None:
    # The first process has left before the second, which is slower, has heard of anything.
    with running(0.0, 0.02, num_steps=20) as made:
        made[0].thread.join(30)
        made[1].requests.ask("SIGTERM")
    assert made[0].done == made[1].done == []
    assert made[1].requests.left_over() == "SIGTERM"


def test_a_stop_that_was_agreed_on_and_not_handed_out_is_left_over() -> None:
    board, progress = Board(), Progress(step=9)
    made = [
        SharedRequests(lambda: None, [], board=board, rank=rank, world_size=2, progress=progress) for rank in range(2)
    ]
    for each in made:
        each.start()
    made[1].ask("SIGTERM")
    wait_until(lambda: made[0].left_over() == "SIGTERM")
    assert made[0].due(10) == "SIGTERM"
    assert made[0].left_over() is None
    for each in made:
        each.close()
    assert made[1].left_over() == "SIGTERM"


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the end of the process in place of ending it, which would end pytest."""
    statuses: list[int] = []

    def exit_(status: int) -> None:
        statuses.append(status)

    monkeypatch.setattr(requests.os, "_exit", exit_)
    return statuses


def make_silent_pair(monkeypatch: pytest.MonkeyPatch, board: Board) -> tuple[SharedRequests, list[Any]]:
    """Return the first of two processes; the second never says anything."""
    monkeypatch.setattr(requests, "_ANSWER_S", 0.1)
    pending: list[Any] = []
    first = SharedRequests(lambda: None, pending, board=board, rank=0, world_size=2, progress=Progress())
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
    wait_until(lambda: "another process does not answer" in caplog.text)
    wait_until(lambda: not pending)
    assert first.due(1) is None
    first.close()


def test_nobody_hears_requests_after_the_board_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    first, pending = make_silent_pair(monkeypatch, board)

    def fail(key: str) -> str:
        raise RuntimeError("connection lost")

    monkeypatch.setattr(board, "read", fail)
    wait_until(lambda: not first.ask(SAVE))
    assert pending == []
    first.close()
