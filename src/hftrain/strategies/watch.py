"""Detect and report failed or missing ranks without a collective."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch.distributed as dist

from hftrain.core.errors import StrategyError, listed
from hftrain.core.notes import user_line, waits_for_others
from hftrain.core.preserve import temporarily
from hftrain.core.state import Counter
from hftrain.preemption.consensus import Board
from hftrain.preemption.grace import end_process
from hftrain.strategies.links import Links

_POLL_S = 1.0
_LOOK_S = 0.02
_NOTICE_S = 1.5 * _POLL_S
# Other ranks poll late on a busy machine; ranks that are gone never do.
_HEARD_S = 6 * _POLL_S
# A process whose peer failed usually ends by itself because its next collective fails.
_GRACE_S = 5.0
_ANSWER_S = 3 * _POLL_S
_MEET_S = 0.02
# Patterns in the messages of gloo, NCCL and collective saves about another rank's failure.
_BROKEN = re.compile(r"gloo|nccl|connection (closed|reset|refused)|another process failed|pair closure", re.IGNORECASE)
_LATE = re.compile(r"timed out|timeout", re.IGNORECASE)


class RankWatch:
    """End all ranks when one fails, and report where each rank is, with notes on a board that a thread polls.

    A process that fails prints its traceback and then posts a note. A process that only fails because another is gone
    prints one line instead of a traceback, and one that notices nothing is ended a few seconds later. Training steps
    have no overhead: the thread polls once a second.

    Args:
        make_board: Returns a board that only this group's watches use; then one for each `Agreement`.
        link_timeout_s: How long another machine may be silent before this process is ended; 0 disables it. See `Links`.

    Attributes:
        where: Returns a description of what this process is doing; called when another rank asks.
        chores: Called by the thread at each poll.
        timeout_s: How long `meet` waits at most.
        before_end: Called before this process is ended because another one failed; must not block. None for nothing.
    """

    def __init__(
        self, make_board: Callable[[], Board], *, rank: int, world_size: int, link_timeout_s: float = 0.0
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.where: Callable[[], str] = lambda: "between training and evaluations"
        self.timeout_s = 1800.0
        self.chores: dict[str, Callable[[], None]] = {}
        self.before_end: Callable[[], None] | None = None
        self.has_failed = False
        self.make_board, self._board = make_board, make_board()
        self._watched = threading.get_ident()
        self._is_over = threading.Event()
        self._last_question: str | None = None
        self._failure: str | None = None
        self._gave_up = self._is_cut = False
        self._num_calls = 0
        self._parent = os.getppid()
        self._hooks = sys.excepthook, self._report
        sys.excepthook = self._hooks[1]
        self._thread = threading.Thread(target=self._listen, name="hftrain-watch", daemon=True)
        self._thread.start()
        self._links = (
            Links(self._board, rank=rank, timeout_s=link_timeout_s, on_lost=self._lose) if link_timeout_s else None
        )

    def stop(self) -> None:
        """Stop the thread and restore `sys.excepthook`; safe to call twice."""
        if not self._is_over.is_set():
            self._post(f"call {self.rank}", json.dumps([0, "has ended"]))
        self._is_over.set()
        if self._links is not None:
            self._links.close()
        self._thread.join(timeout=2 * _POLL_S)
        if sys.excepthook is self._hooks[1]:
            sys.excepthook = self._hooks[0]

    def late(self, error: BaseException, *, timeout_s: float) -> StrategyError | None:
        """Return the error to raise when a collective timed out: which ranks are missing and where they are.

        Returns None for any other error. Takes a few seconds.
        """
        if not (is_broken_exchange(error) and _LATE.search(str(error))):
            return None
        problem, places = self.missing()
        return StrategyError(
            f"Rank {self.rank} waited in {self.where()!r} for the other ranks.",
            f"{problem} within {timeout_s:g} s: {places}.",
            "Fix what delays them, or raise ddp_timeout.",
        )

    def meet(self, call: str) -> None:
        """Wait until every rank has made the same collective call.

        Raises:
            StrategyError: A rank makes another call, has ended, or waits for this one elsewhere.
        """
        self._num_calls += 1
        note = [self._num_calls, f"calls {call}()"]
        self._post(f"call {self.rank}", json.dumps(note))
        asked_s, deadline = time.monotonic(), time.monotonic() + self.timeout_s
        answers: dict[int, Any] = {}
        while not self._is_over.is_set():
            notes = [json.loads(self._read(f"call {rank}") or "[0, null]") for rank in range(self.world_size)]
            late = [rank for rank, (number, _) in enumerate(notes) if number < note[0]]
            reports = {
                r: text for r, (number, text) in enumerate(notes) if number in (0, note[0]) and text != note[1] and text
            }
            if late and not reports and time.monotonic() > asked_s + _POLL_S:
                last_answers, asked_s = answers, time.monotonic()
                with temporarily(self, _gave_up=True):
                    answers = self._ask()
                # Twice at one place: ranks may wait for each other for a moment.
                waiting = {r for r in late if _waits(answers.get(r)) and answers[r][1:] == last_answers.get(r, [])[1:]}
                reports = {rank: _describe(answers.get(rank)) for rank in (late if asked_s > deadline else waiting)}
            if reports:
                self._num_calls -= 1
                raise StrategyError(
                    f"Rank {self.rank} cannot call {call}() without the other ranks:",
                    "; ".join(f"rank {rank} {text}" for rank, text in reports.items()) + ".",
                    "Call it on every rank, and not after `if trainer.is_world_process_zero():`.",
                )
            if not late:
                return
            time.sleep(_MEET_S)

    def agreement(self, position: Counter, *, problem: str, remedy: str) -> Agreement:
        """Return a check that all ranks make the same change; see `Agreement`. Collective."""
        return Agreement(self, self.make_board(), position, problem=problem, remedy=remedy)

    def missing(self) -> tuple[str, str]:
        """Return which ranks are missing where this one waits, and where each rank is, as text; takes seconds."""
        answers = self._ask()
        missing = [rank for rank in range(self.world_size) if rank != self.rank and not _waits(answers.get(rank))]
        places = "; ".join(f"rank {rank} {_describe(answers.get(rank))}" for rank in sorted({*missing, *answers}))
        problem = f"Rank {', '.join(map(str, missing))} did not come" if missing else "The ranks wait for each other"
        return problem, places

    def failure_elsewhere(self, *, wait_s: float = 0.0) -> str | None:
        """Return which other process failed and how, as soon as one posts it; None if none does within `wait_s`."""
        deadline = time.monotonic() + wait_s
        while True:
            # Cache it: the process that serves the store may be gone when the second thread reads.
            self._failure = self._failure or self._read("failed")
            if self._failure is not None and not self.has_failed:
                self._post(f"heard {self.rank}", "")
                return self._failure
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an uncaught error and post it to the other ranks; replaces `sys.excepthook`."""
        if is_broken_exchange(error):
            failure = self.failure_elsewhere(wait_s=_ANSWER_S)
            if failure is not None:
                self._end_line(failure)
                return
        self._hooks[0](kind, error, trace)
        sys.stderr.flush()
        if issubclass(kind, Exception):
            self.has_failed = True
            first_line = str(error).strip().partition("\n")[0]
            self._post("failed", f"rank {self.rank} failed: {kind.__name__}: {first_line}")
            self._post(f"heard {self.rank}", "")
            self._await_others()

    def _await_others(self) -> None:
        """Wait until the others have read the note, because the store may end with this process."""
        deadline = time.monotonic() + _HEARD_S
        while time.monotonic() < deadline and not self._is_over.is_set():
            if all(self._read(f"heard {rank}") is not None for rank in range(self.world_size)):
                return
            time.sleep(0.05)

    def _listen(self) -> None:
        while not self._is_over.wait(_POLL_S):
            failure = self.failure_elsewhere()
            if failure is not None:
                if not self._is_over.wait(_GRACE_S):
                    self._end_line(failure)
                    # The main thread waits in a collective that never ends and that no exception can interrupt.
                    end_process(1)
                return
            question = self._read("asked")
            if question != self._last_question:
                self._last_question = question
                self._post(f"at {self.rank}", json.dumps([question, *self._place()]))
            try:
                for chore in tuple(self.chores.values()):
                    chore()
            except (RuntimeError, OSError):
                self._is_over.set()
        if self._is_cut and self._is_orphan():
            self._end_line("torchrun, which started it, is gone, and the ranks cannot agree on a last checkpoint")
            end_process(1)

    def _is_orphan(self) -> bool:
        """Return whether the torchrun that started this process and served the store was killed.

        The process group still works, but no launcher waits for it, and the next job may use the same folder.
        """
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.getppid() != self._parent

    def _lose(self, failure: str) -> None:
        """End this process after it lost another rank, because its main thread may wait for that rank forever."""
        self.has_failed = True
        self._end_line(failure)
        # The store may be unreachable as well, and the call would then block.
        threading.Thread(target=self._post, args=("failed", failure), daemon=True).start()
        time.sleep(_NOTICE_S)
        end_process(1)

    def _ask(self) -> dict[int, Any]:
        """Return the position that each other rank's thread reports; some ranks may not answer in time."""
        self._gave_up = True
        last_question = self._read("asked")
        self._post("asked", f"{self.rank} {time.time()}")
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + _ANSWER_S
        while len(answers) < self.world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
            for rank in range(self.world_size):
                answer = json.loads(self._read(f"at {rank}") or "[null]")
                # Accept an answer to any rank's new question.
                if rank != self.rank and answer[0] not in (None, last_question):
                    answers[rank] = answer
        return answers

    def _place(self) -> tuple[bool, str, str]:
        """Return whether the process waits for others, what it is doing, and the line of user code."""
        waits = self._gave_up or waits_for_others(self._watched)
        return waits, self.where(), user_line(self._watched)

    def _end_line(self, failure: str) -> None:
        print(f"[rank{self.rank}]: ended, because {failure}", file=sys.stderr, flush=True)
        with suppress(Exception):
            if self.before_end is not None:
                self.before_end()

    def _post(self, key: str, text: str) -> None:
        try:
            self._board.post(key, text)
        except (RuntimeError, OSError):
            self._cut()

    def _read(self, key: str) -> str | None:
        try:
            return self._board.read(key)
        except (RuntimeError, OSError):
            self._cut()
            return None

    def _cut(self) -> None:
        """Record that the store is gone, and with it all ranks' groups unless torchrun served it."""
        self._is_cut = True
        self._is_over.set()


class Agreement:
    """Check that all ranks make the same change at the same position, such as a forward pass.

    A position without a change has no overhead. A rank with a change posts a note and waits for the others' notes; on a
    rank that has continued without a change, the watch's thread answers.

    Args:
        board: One that only this agreement uses, on all ranks.
        position: This rank's position, which increases in the same way on every rank.
        problem: What is wrong if the changes differ.
        remedy: What to do then.
    """

    def __init__(self, watch: RankWatch, board: Board, position: Counter, *, problem: str, remedy: str) -> None:
        self._problem, self._remedy = problem, remedy
        self.watch, self._board, self._position = watch, board, position
        self._rank, self._ranks, self._timeout_s = watch.rank, range(watch.world_size), watch.timeout_s
        self._notes: list[tuple[int, list[str]]] = []
        self._lock = threading.Lock()
        self.watch.chores[problem] = self._answer

    def check(self, change: list[str]) -> None:
        """Wait for the other ranks' changes. Collective among the ranks that make one.

        Raises:
            StrategyError: Another rank makes another change, or none.
        """
        position = self._position.value
        with self._lock:
            # Before the note: a rank that has read all notes of a position must not be asked for it again.
            self._board.post("change", str(position))
            self._post(position, change)
        deadline = time.monotonic() + self._timeout_s
        while others := {rank: names for rank in self._ranks if (names := self._read_change(rank, position)) != change}:
            if any(names is not None for names in others.values()) or time.monotonic() > deadline:
                changes = "; ".join(f"rank {rank}: {_change(names)}" for rank, names in others.items())
                raise StrategyError(self._problem, f"Rank {self._rank}: {_change(change)}; {changes}.", self._remedy)
            time.sleep(_LOOK_S)

    def _read_change(self, rank: int, position: int) -> list[str] | None:
        notes: dict[int, list[str]] = dict(json.loads(self._board.read(f"rank {rank}") or "[]"))
        return notes.get(position)

    def _post(self, position: int, change: list[str]) -> None:
        # With the note before, which a slower rank may still have to read; all have read the earlier ones.
        self._notes = [*self._notes[-1:], (position, change)]
        self._board.post(f"rank {self._rank}", json.dumps(self._notes))

    def _answer(self) -> None:
        """Post that this rank has continued without a change; called by the watch's thread."""
        with self._lock:
            at = int(self._board.read("change") or -1)
            if 0 <= at < self._position.value and at not in dict(self._notes):
                self._post(at, [])


def is_broken_exchange(error: BaseException) -> bool:
    """Return whether an error only reports that communication with other ranks failed."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_BROKEN.search(str(error))))


def is_peer_gone(error: BaseException) -> bool:
    """Return whether an error reports that another rank's process has ended, not that it is late."""
    return is_broken_exchange(error) and not _LATE.search(str(error))


def _waits(answer: Any) -> bool:
    return answer is not None and bool(answer[1])


def _describe(answer: Any) -> str:
    if answer is None:
        return "does not answer"
    return f"waits in {answer[2]!r}" if answer[1] else f"is in {answer[2]!r}, at {answer[3]}"


def _change(change: list[str] | None) -> str:
    return "no answer" if change is None else listed(change) or "no change"
