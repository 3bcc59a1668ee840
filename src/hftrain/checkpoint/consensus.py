"""What is asked of a running training, and the step boundary at which all its processes do it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from hftrain.core.errors import CheckpointError
from hftrain.core.log import get_logger
from hftrain.core.progress import Progress
from hftrain.strategies.board import Board

logger = get_logger(__name__)

SAVE = "save"
STOPS = ("SIGINT", "SIGTERM")
_STRENGTH = {SAVE: 1, "SIGINT": 2, "SIGTERM": 3}

# How often a process looks whether another one has asked for something.
_POLL_S = 0.25
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-3, 0.05
# A process that does not answer for so long is taken to be gone.
_ANSWER_S = 20.0
_JOIN_S = 5.0
_LONGEST_WAIT_S = 3600.0


def strongest(asked: Iterable[str | None]) -> str | None:
    """Return what includes the rest: a stop saves too, and SIGTERM cannot be taken back as SIGINT can.

    Requests of other names are the weakest, and nothing includes them.

    Example:
        >>> strongest(["save", "SIGTERM", None, "SIGINT"])
        'SIGTERM'
    """
    return max((each for each in asked if each is not None), key=lambda each: _STRENGTH.get(each, 0), default=None)


class Group(Protocol):
    """The processes that save together; a strategy is one."""

    @property
    def rank(self) -> int:
        """This process's number."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that commits."""

    @property
    def is_local_main(self) -> bool:
        """Whether this is the one process of its machine that commits where each machine keeps its own."""

    def barrier(self) -> None:
        """Wait for all; collective."""

    def all_true(self, flag: bool) -> bool:
        """Tell every process whether the flag is set on all; collective."""


class Consensus:
    """Let processes agree through notes, which no thread needs a collective for.

    **On a step boundary**, at which all do what any one of them was asked. A round begins when a process opens it on
    the board. On seeing that, each process's thread first puts `act` where the loop calls it at the next step boundary,
    then reads the process's step and posts it. From then on that process passes no boundary but the one it may be at
    before `act` is called and waits: the boundary after the highest step posted is one that nobody has passed. The main
    process finds it and posts it. Nothing depends on how long anything takes, and a step pays nothing. A process that
    is alone acts at its next boundary.

    **Within a save in the background**: this object is the `Group` whose `barrier` and `all_true` a thread may call.

    Args:
        act: Called by the loop at each step boundary while something is asked; calls `due`.
        pending: What the loop calls at each step's end, see `FitParts`; mutated.
        group: The processes.
        board: Where they leave notes; a new one.
        progress: Where this process is; read by the thread.
        timeout_s: How many seconds a save in the background waits for the other processes.
        every_s: Ask for a save whenever so many seconds have passed since the last one; the main process's clock
            decides for all.

    Attributes:
        on_stop: Called by the thread, among several processes, when all have agreed to stop because of SIGTERM.
        is_waiting: Whether a save in the background waits for the other processes, and writes nothing here.
    """

    on_stop: Callable[[], None] | None = None
    is_waiting: bool = False

    def __init__(
        self,
        act: Callable[[], None],
        pending: list[Callable[[], None]],
        *,
        group: Group,
        board: Board,
        progress: Progress,
        timeout_s: float,
        every_s: float | None = None,
    ) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self.is_main, self.is_local_main = group.is_main, group.is_local_main
        self._act, self._pending, self._board, self._progress = act, pending, board, progress
        self._timeout_s, self._every_s = timeout_s, every_s if group.is_main else None
        self._saved_at_s = time.monotonic()
        self._asked: set[str] = set()
        # Unlike anything with a lock, it may be rung in a signal handler.
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._is_closing = self._is_deaf = False
        self._turn = 0
        self._agreed: tuple[str | None, int] | None = None
        self._is_known, self._is_taken = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="hftrain-consensus", daemon=True)

    # -- for the main thread and signal handlers -----------------------------------------------------------------

    def ask(self, what: str) -> bool:
        """Ask for something, from any thread or a signal handler; return whether somebody will see to it."""
        self._asked.add(what)
        if self.world_size == 1:
            self._raise_flag()
        else:
            self._bell.put(None)
        return not self._is_deaf

    def withdraw(self, what: str) -> None:
        """Forget a request that is settled; a round that has begun may still hand it out."""
        self._asked.discard(what)

    def due(self, step: int) -> str | None:
        """Return what all do at the boundary after `step`, if anything; for the main thread, from `act`."""
        if self.world_size == 1:
            # First this: what is asked from here on shows at the next boundary.
            self._lower_flag()
            what = strongest(set(self._asked))
            self._forget(what)
            if self._asked:
                self._raise_flag()
            return what
        # With a timeout, or some systems would run no signal handler meanwhile.
        while not self._is_known.wait(1.0):
            pass
        if self._agreed is None or step < self._agreed[1]:
            return None
        what, self._agreed = self._agreed[0], None
        self._is_known.clear()
        self._lower_flag()
        # Only now may the thread begin another round.
        self._is_taken.set()
        return what

    def left_over(self) -> str | None:
        """Return the stop that was asked for and never handed out."""
        asked, agreed = strongest(self._asked.intersection(STOPS)), self._agreed
        # The boundary that was agreed on may lie behind the run's end.
        return strongest([asked, agreed[0]]) if agreed is not None and agreed[0] in STOPS else asked

    def share(self, value: Any) -> list[str | None]:
        """Leave a note of where this process is, as JSON, and return everybody's last one; from any thread."""
        text = json.dumps(value)
        if self.world_size == 1:
            return [text]
        self._board.post(f"at/{self.rank}", text)
        return [self._board.read(f"at/{rank}") for rank in range(self.world_size)]

    def note_save(self) -> None:
        """Hear that a checkpoint was saved: the clock starts again."""
        self._saved_at_s = time.monotonic()

    def start(self) -> None:
        """Start to look around, in a thread of its own, if there is something to look at."""
        if self.world_size > 1 or self._every_s is not None:
            self._watcher.start()

    def close(self, *, is_failed: bool = False) -> None:
        """End the thread. `barrier` and `all_true` still serve a save that is not over."""
        self._is_closing = True
        self._bell.put(None)
        if self._watcher.is_alive():
            self._watcher.join(_JOIN_S)
        # After the thread's last note: who sees this one has seen all.
        if self.world_size > 1 and not self._watcher.is_alive() and not self._is_deaf:
            with suppress(Exception):
                self._board.post(f"left/{self.rank}", "failed" if is_failed else "ended")

    # -- for a save in the background ----------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait for all; see `all_true`."""
        self.all_true(True)

    def all_true(self, flag: bool) -> bool:
        """Tell every process whether the flag is set on all, from one thread of each, in the same order.

        Raises:
            CheckpointError: Another process does not call this in time.
        """
        if self.world_size == 1:
            return flag
        deadline_s = time.monotonic() + self._timeout_s
        self._turn += 1

        def is_late(of: int) -> bool:
            if time.monotonic() < deadline_s:
                return False
            raise CheckpointError(
                "Processes were to agree on a save in the background.",
                f"There was no word from rank {of} in {self._timeout_s:g} s.",
                "Look for its error; allow more time with ddp_timeout.",
            )

        self.is_waiting = True
        try:
            return bool(self._exchange("save", self._turn, flag, all, is_late))
        finally:
            self.is_waiting = False

    # -- the thread ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            for number in itertools.count():
                if not (self._wait_for(number) and self._hold(number)):
                    return
        except Exception as error:
            # The board is gone, and with it the process that kept it.
            self._is_deaf = True
            if not self._is_closing:
                self._end_if_asked(f"the processes cannot reach each other any more ({error!r})")
            self._release()

    def _wait_for(self, number: int) -> bool:
        """Open a round, or wait until another process does; False if this one's training is over first."""
        while not self._is_closing:
            until_save_s = self._look_at_clock()
            if self.world_size > 1:
                if int(self._board.read("opened") or -1) >= number:
                    return True
                if self._asked:
                    self._board.post("opened", str(number))
                    return True
                until_save_s = min(_POLL_S, until_save_s)
            with suppress(Empty):
                self._bell.get(timeout=max(until_save_s, 0.0))
        return False

    def _look_at_clock(self) -> float:
        """Ask for a save if it is time; return the seconds until it is."""
        if self._every_s is None:
            return _LONGEST_WAIT_S
        if time.monotonic() - self._saved_at_s >= self._every_s:
            self._saved_at_s = time.monotonic()
            self.ask(SAVE)
        return min(self._saved_at_s + self._every_s - time.monotonic(), _LONGEST_WAIT_S)

    def _hold(self, number: int) -> bool:
        """Take part in a round, and wait until the main thread has done what came of it; False if it was the last."""
        self._is_known.clear()
        # In this order: see the class.
        self._raise_flag()
        note = [self._progress.step, strongest(set(self._asked))]
        agreed = self._exchange("round", number, note, _decide, self._gives_up())
        if agreed is None:
            return self._go_on_alone()
        # In this order: a stop shows in one of them at any time, see `left_over`.
        self._agreed = agreed[0], int(agreed[1])
        self._forget(agreed[0])
        if self.on_stop is not None and agreed[0] == "SIGTERM":
            self.on_stop()
        self._is_known.set()
        while not self._is_taken.wait(_POLL_S):
            if self._is_closing:
                return False
        self._is_taken.clear()
        return True

    def _gives_up(self) -> Callable[[int], bool]:
        """Return what tells whether a round's note of a process will not come."""
        begun_s = time.monotonic()

        def gives_up(of: int) -> bool:
            waited_s = time.monotonic() - begun_s
            if waited_s > 2 * _ANSWER_S:
                self._end_if_asked(f"process {of} does not answer")
            # The main process alone decides that somebody is gone, so that all see the same answer.
            is_late = self.is_main and waited_s > _ANSWER_S
            return self._is_closing or is_late or self._board.read(f"left/{of}") is not None

        return gives_up

    def _go_on_alone(self) -> bool:
        """Let the training go on after a round that came to nothing; False if no other round can come to anything."""
        if self._is_closing:
            self._release()
            return False
        left = [self._board.read(f"left/{rank}") for rank in range(self.world_size)]
        self._is_deaf = "failed" in left
        if self._is_deaf:
            self._end_if_asked("another process has failed")
        elif "ended" not in left:
            self._end_if_asked("another process does not answer")
            if SAVE in self._asked:
                logger.warning("Nothing is saved now as was asked: another process does not answer.")
                self._asked.discard(SAVE)
        self._release()
        return not any(left)

    def _release(self) -> None:
        self._agreed = None
        self._lower_flag()
        self._is_known.set()

    def _end_if_asked(self, reason: str) -> None:
        """End this process at once if it was told to stop: its main thread may wait for the others forever."""
        stop = self.left_over()
        if stop is not None:
            logger.error("%s ends the process at once and nothing is saved: %s.", stop, reason)
            os._exit(128 + signal.Signals[stop])

    # -- what all share ------------------------------------------------------------------------------------------

    def _exchange(
        self, topic: str, turn: int, value: Any, combine: Callable[[list[Any]], Any], gives_up: Callable[[int], bool]
    ) -> Any:
        """Return what the main process makes of all processes' values; None if it does not say.

        Notes of one topic are written over, so their number does not grow. None is lost: the main process replaces its
        own after it has the next one of all others.
        """
        self._board.post(f"{topic}/{self.rank}", json.dumps([turn, value]))
        if self.is_main:
            found = combine([self._hear(f"{topic}/{rank}", turn, rank, gives_up) for rank in range(self.world_size)])
            # Not the failure to hear all from a process that is leaving itself: it will say so.
            if found is not None or not self._is_closing:
                self._board.post(topic, json.dumps([turn, found]))
        return self._hear(topic, turn, 0, gives_up)

    def _hear(self, key: str, turn: int, of: int, gives_up: Callable[[int], bool]) -> Any:
        """Return a process's note, or None if it gives none."""
        pause_s = _FIRST_PAUSE_S
        while True:
            # Looked at first: a process that has left posts nothing afterwards.
            is_over = gives_up(of)
            at, value = json.loads(self._board.read(key) or "[-1, null]")
            if at == turn:
                return value
            if is_over or at > turn:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _forget(self, what: str | None) -> None:
        """Drop a request that is handed out, with those that it includes."""
        strength = _STRENGTH.get(what or "", 0)
        self._asked -= {what, *(each for each, its_own in _STRENGTH.items() if its_own <= strength)}

    def _raise_flag(self) -> None:
        if self._act not in self._pending:
            self._pending.append(self._act)

    def _lower_flag(self) -> None:
        while self._act in self._pending:
            self._pending.remove(self._act)


def _decide(notes: list[Any]) -> tuple[str | None, int] | None:
    """Return what is done and after which step; None if a process has left, or does not answer."""
    if None in notes:
        return None
    return strongest(asked for _, asked in notes), 1 + max(step for step, _ in notes)
