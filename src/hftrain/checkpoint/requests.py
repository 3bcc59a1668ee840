"""What is asked of a running training from outside, and the step boundary at which all its processes do it."""

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

from hftrain.core.log import get_logger
from hftrain.core.progress import Progress
from hftrain.strategies.board import Board

logger = get_logger(__name__)

SAVE = "save"
STOPS = ("SIGINT", "SIGTERM")
_BY_STRENGTH = (SAVE, *STOPS)

# How often a process looks whether another one has asked for something.
_POLL_S = 0.25
# A process that does not answer for so long is taken to be gone.
_ANSWER_S = 20.0
_JOIN_S = 5.0
_LONGEST_WAIT_S = 3600.0


def strongest(asked: Iterable[str | None]) -> str | None:
    """Return what includes all the rest: a stop saves too, and SIGTERM cannot be taken back as SIGINT can.

    Example:
        >>> strongest(["save", "SIGTERM", None, "SIGINT"])
        'SIGTERM'
    """
    return max((each for each in asked if each is not None), key=_BY_STRENGTH.index, default=None)


class StepRequests:
    """Take what is asked of one process, and hand it out at the next step boundary.

    Args:
        heed: Called by the loop at each step boundary while something is asked; see `pending`.
        pending: What the loop calls at each step's end, see `FitParts`.
        every_s: Ask for a save whenever this much time has passed since the last one.

    Units:
        every_s: seconds.
    """

    def __init__(
        self, heed: Callable[[], None], pending: list[Callable[[], None]], *, every_s: float | None = None
    ) -> None:
        self._heed, self._pending = heed, pending
        self._asked: set[str] = set()
        self._every_s = every_s
        self._saved_at_s = time.monotonic()
        # Unlike anything with a lock, it may be rung in a signal handler.
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._is_closing = False
        self._watcher = threading.Thread(target=self._watch, name="hftrain-requests", daemon=True)

    def ask(self, what: str) -> bool:
        """Ask for a save or a stop, from any thread or a signal handler.

        Args:
            what: `SAVE`, or one of `STOPS`.

        Returns:
            Whether somebody will see to it.
        """
        self._asked.add(what)
        self._raise_flag()
        return True

    def due(self, step: int) -> str | None:
        """Return what to do at the boundary after `step`, if anything; for the main thread, from `heed`."""
        # First this: what is asked from here on shows at the next boundary.
        self._lower_flag()
        return strongest({self._asked.pop() for _ in range(len(self._asked))})

    def left_over(self) -> str | None:
        """Return the stop that was asked for and never handed out."""
        return strongest(self._asked.intersection(STOPS))

    def note_save(self) -> None:
        """Hear that a checkpoint was saved: the clock starts again."""
        self._saved_at_s = time.monotonic()

    def start(self) -> None:
        """Start to look around, in a thread of its own, if there is something to look at."""
        if self._every_s is not None:
            self._watcher.start()

    def close(self, *, is_failed: bool = False) -> None:
        """End the thread.

        Args:
            is_failed: Whether the training ends by an error.
        """
        self._is_closing = True
        self._bell.put(None)
        if self._watcher.is_alive():
            self._watcher.join(_JOIN_S)

    def _raise_flag(self) -> None:
        if self._heed not in self._pending:
            self._pending.append(self._heed)

    def _lower_flag(self) -> None:
        while self._heed in self._pending:
            self._pending.remove(self._heed)

    def _watch(self) -> None:
        while not self._is_closing:
            self._doze(self._look_at_clock())

    def _look_at_clock(self) -> float:
        """Ask for a save if it is time; return the seconds until it is."""
        if self._every_s is None:
            return _LONGEST_WAIT_S
        if time.monotonic() - self._saved_at_s >= self._every_s:
            self._saved_at_s = time.monotonic()
            self.ask(SAVE)
        return min(self._saved_at_s + self._every_s - time.monotonic(), _LONGEST_WAIT_S)

    def _doze(self, duration_s: float) -> None:
        with suppress(Empty):
            self._bell.get(timeout=max(duration_s, 0.0))


class SharedRequests(StepRequests):
    """Let several processes agree on the step boundary at which they do what any one of them was asked.

    A round begins when a process opens it on the board. On seeing that, each process's thread first puts `heed` where
    the loop calls it at the next step boundary, then reads the process's step and posts it. From then on that process
    passes no boundary but the one it may be at before `heed` is called and waits: the boundary after the highest step
    posted is one that nobody has passed. The first process finds it and posts it. Nobody's training waits in a
    collective for this, and nothing depends on how long anything takes.

    Args:
        heed, pending: As in `StepRequests`.
        board: Where the processes leave notes; a new one.
        rank: This process.
        world_size: How many there are.
        progress: Where this process is; read by the thread.
        every_s: As in `StepRequests`; one process's clock decides for all.
    """

    def __init__(
        self,
        heed: Callable[[], None],
        pending: list[Callable[[], None]],
        *,
        board: Board,
        rank: int,
        world_size: int,
        progress: Progress,
        every_s: float | None = None,
    ) -> None:
        super().__init__(heed, pending, every_s=every_s if rank == 0 else None)
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._progress = progress
        self._is_deaf = False
        self._agreed: tuple[str, int] | None = None
        self._is_known, self._is_taken = threading.Event(), threading.Event()

    def ask(self, what: str) -> bool:
        self._asked.add(what)
        self._bell.put(None)
        return not self._is_deaf

    def due(self, step: int) -> str | None:
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
        asked, agreed = super().left_over(), self._agreed
        # The boundary that was agreed on may lie behind the run's end.
        return strongest([asked, agreed[0]]) if agreed is not None and agreed[0] in STOPS else asked

    def start(self) -> None:
        self._watcher.start()

    def close(self, *, is_failed: bool = False) -> None:
        super().close()
        # After the thread's last note: who sees this one has seen all.
        if not self._watcher.is_alive() and not self._is_deaf:
            with suppress(Exception):
                self._board.post(f"left/{self._rank}", "failed" if is_failed else "ended")

    def _watch(self) -> None:
        try:
            for number in itertools.count():
                if not (self._wait_for(number) and self._agree(number)):
                    return
        except Exception as error:
            # The board is gone, and with it the process that kept it.
            self._is_deaf = True
            if not self._is_closing:
                self._end_if_asked(f"the processes cannot reach each other any more ({error!r})")
            self._release()

    def _wait_for(self, number: int) -> bool:
        """Wait until a round is opened, by whichever process; False if this one's training is over first."""
        while not self._is_closing:
            until_save_s = self._look_at_clock()
            if self._asked or self._board.read(f"{number}/open") is not None:
                return True
            self._doze(min(_POLL_S, until_save_s))
        return False

    def _agree(self, number: int) -> bool:
        """Take part in a round, and wait until the main thread has done what came of it; False if it was the last."""
        self._board.post(f"{number}/open", "")
        self._is_known.clear()
        # In this order: see the class.
        self._raise_flag()
        self._board.post(f"{number}/at/{self._rank}", json.dumps([self._progress.step, strongest(set(self._asked))]))
        if self._rank == 0:
            collected = self._collect(number)
            if collected is not None or not self._is_closing:
                self._board.post(f"{number}/agreed", json.dumps(collected))
        found = self._await(f"{number}/agreed", of=0)
        agreed = None if found is None else json.loads(found)
        if agreed is None:
            return self._go_on_alone()
        # In this order: a stop shows in one of them at any time, see `left_over`.
        self._agreed = agreed[0], int(agreed[1])
        self._asked.difference_update(_BY_STRENGTH[: _BY_STRENGTH.index(agreed[0]) + 1])
        self._is_known.set()
        while not self._is_taken.wait(_POLL_S):
            if self._is_closing:
                return False
        self._is_taken.clear()
        return True

    def _collect(self, number: int) -> tuple[str, int] | None:
        """Return what is done and after which step; None if a process has left, or does not answer."""
        deadline_s = time.monotonic() + _ANSWER_S
        notes = []
        for rank in range(self._world_size):
            note = self._await(f"{number}/at/{rank}", of=rank, deadline_s=deadline_s)
            if note is None:
                return None
            notes.append(json.loads(note))
        what = strongest(asked for _, asked in notes)
        return None if what is None else (what, 1 + max(step for step, _ in notes))

    def _await(self, key: str, *, of: int, deadline_s: float | None = None) -> str | None:
        """Return a process's note, or None if it has left without one."""
        pause_s, begun_s = 0.005, time.monotonic()
        while True:
            # Looked at first: a process that has left posts nothing afterwards.
            has_left = self._board.read(f"left/{of}") is not None
            note = self._board.read(key)
            if note is not None:
                return note
            if has_left or self._is_closing or (deadline_s is not None and time.monotonic() > deadline_s):
                return None
            if time.monotonic() - begun_s > 2 * _ANSWER_S:
                self._end_if_asked(f"process {of} does not answer")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)

    def _go_on_alone(self) -> bool:
        """Let the training go on after a round that came to nothing; False if no other round can come to anything."""
        if self._is_closing:
            self._release()
            return False
        left = [self._board.read(f"left/{rank}") for rank in range(self._world_size)]
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
        """End this process at once if it was told to stop: its main thread may wait for the others for ever."""
        stop = self.left_over()
        if stop is not None:
            logger.error("%s ends the process at once and nothing is saved: %s.", stop, reason)
            os._exit(128 + signal.Signals[stop])
