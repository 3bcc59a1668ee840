"""Requests to a running training, and agreement on the step boundary at which all processes act on them."""

from __future__ import annotations

import itertools
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from hftrain.core.errors import CheckpointError
from hftrain.core.log import get_logger
from hftrain.core.preserve import temporarily
from hftrain.core.state import Progress
from hftrain.preemption.grace import end_process

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Board:
    """A key-value board that any process may write and read at any time and from any thread.

    A collective needs all processes at the same call, which a signal handler or background writer cannot ensure.

    Args:
        store: The processes' shared store; None for a single process.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._notes: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        """Write a note; replaces an earlier one with the same key."""
        if self._store is None:
            self._notes[key] = text
        else:
            self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """Return a note, or None if it has not been written; does not wait."""
        if self._store is None:
            return self._notes.get(key)
        return self._store.get(key).decode() if self._store.check([key]) else None


logger = get_logger(__name__)

SAVE = "save"
STOPS = ("SIGINT", "SIGTERM")
_STRENGTH = {SAVE: 1, "SIGINT": 2, "SIGTERM": 3}

# How often a process checks for requests of the others.
_POLL_S = 0.25
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-3, 0.05
# A process that does not answer for this long is considered dead.
_ANSWER_S = 20.0
_JOIN_S = 5.0


def strongest(asked: Iterable[str | None]) -> str | None:
    """Return the request that includes the others: a stop also saves, and SIGTERM is stronger than SIGINT.

    Requests of other names are the weakest, and no request includes them.

    Example:
        >>> strongest(["save", "SIGTERM", None, "SIGINT"])
        'SIGTERM'
    """
    return max((each for each in asked if each is not None), key=lambda each: _STRENGTH.get(each, 0), default=None)


class Group(Protocol):
    """The processes that save together: a strategy, or what has these of one. `is_main` is the process that commits.

    If each machine keeps its own checkpoints, the process with `is_local_main` commits for it.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def is_main(self) -> bool: ...
    @property
    def is_local_main(self) -> bool: ...
    def all_true(self, flag: bool) -> bool: ...


class Consensus:
    """Let processes agree through notes on a board, without a collective.

    **Agreeing on a step boundary**: all processes act there on a request to any one of them. A process opens a round on
    the board. When another process's thread sees it, it first registers `act` for the next step boundary, then reads
    the process's step and posts it. After that, the process passes at most the boundary it may already be at before
    `act` is called and waits. So no process has passed the boundary after the highest posted step. The main process
    finds that boundary and posts it. The result does not depend on timing, and steps cost nothing. A single process
    acts at its next boundary.

    **During a background save**: this object is the `Group` whose `all_true` a thread may call.

    Args:
        act: Called by the loop at each step boundary while there is a request; calls `due`.
        pending: Functions that the loop calls at the end of each step, see `FitParts`; mutated.
        board: Where they exchange notes; must be new.
        progress: The progress of this process; read by the thread.
        timeout_s: How many seconds a background save waits for the other processes.
        every_s: Request a save whenever this many seconds have passed since the last one, by the clock of the main
            process.

    Attributes:
        on_stop: With several processes, called by the thread when all have agreed to stop because of SIGTERM.
        is_waiting: Whether a background save waits for the other processes, and writes nothing here.
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
        self._act, self._pending_calls, self._board, self._progress = act, pending, board, progress
        self._timeout_s, self._every_s = timeout_s, every_s if group.is_main else None
        self._ends_s = math.inf
        self._saved_at_s = time.monotonic()
        self._requests: set[str] = set()
        self._closing = threading.Event()
        self._is_deaf = False
        self._turn = 0
        self._agreement: tuple[str | None, int] | None = None
        self._is_known, self._is_taken = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="hftrain-consensus", daemon=True)

    # -- for the main thread and signal handlers -----------------------------------------------------------------

    def ask(self, what: str) -> bool:
        """Make a request, from any thread or a signal handler; return whether it will be handled."""
        self._requests.add(what)
        if self.world_size == 1:
            self._raise_flag()
        return not self._is_deaf

    def withdraw(self, what: str) -> None:
        """Remove a request that is handled; a round that has begun may still return it."""
        self._requests.discard(what)

    def due(self, step: int) -> str | None:
        """Return the request to handle at the boundary after `step`, if any; called in the main thread, by `act`."""
        if self.world_size == 1:
            # First, so that later requests are seen at the next boundary.
            self._lower_flag()
            request = strongest(set(self._requests))
            self._forget(request)
            if self._requests:
                self._raise_flag()
            return request
        # With a timeout, because on some systems no signal handler runs otherwise.
        while not self._is_known.wait(1.0):
            pass
        if self._agreement is None or step < self._agreement[1]:
            return None
        request, self._agreement = self._agreement[0], None
        self._is_known.clear()
        self._lower_flag()
        # From here on the thread may begin another round.
        self._is_taken.set()
        return request

    def unhandled_stop(self) -> str | None:
        """Return a requested stop that `due` never returned."""
        stop, agreement = strongest(self._requests.intersection(STOPS)), self._agreement
        # The agreed boundary may be after the end of the run.
        return strongest([stop, agreement[0]]) if agreement is not None and agreement[0] in STOPS else stop

    def share(self, value: Any) -> list[str | None]:
        """Post the progress of this process as JSON, and return the last one of each process; from any thread."""
        self._board.post(f"at/{self.rank}", json.dumps(value))
        return [self._board.read(f"at/{rank}") for rank in range(self.world_size)]

    def note_save(self) -> None:
        """Restart the clock, because a checkpoint was saved."""
        self._saved_at_s = time.monotonic()

    def _check_clock(self) -> None:
        """Request a save if it is due; called at the end of each step."""
        assert self._every_s is not None
        if time.monotonic() - self._saved_at_s >= self._every_s:
            self.note_save()
            self.ask(SAVE)

    def start(self) -> None:
        """Start the clock, and the thread, if they are needed."""
        if self._every_s is not None:
            self._pending_calls.append(self._check_clock)
        if self.world_size > 1:
            self._watcher.start()

    def close(self, *, is_failed: bool = False) -> None:
        """End the thread. `all_true` still works for a save that is not complete."""
        self._closing.set()
        if self._check_clock in self._pending_calls:
            self._pending_calls.remove(self._check_clock)
        if self._watcher.is_alive():
            self._watcher.join(_JOIN_S)
        # Posted after the last note of the thread, so a process that reads this one has read all.
        if self.world_size > 1 and not self._watcher.is_alive() and not self._is_deaf:
            with suppress(Exception):
                self._board.post(f"left/{self.rank}", "failed" if is_failed else "ended")

    # -- for a background save -----------------------------------------------------------------------------------

    def all_true(self, flag: bool) -> bool:
        """Tell every process whether the flag is set on all; called by one thread of each, in the same order.

        Raises:
            CheckpointError: Another process does not call this in time.
        """
        begun_s = time.monotonic()
        self._turn += 1

        def is_late(rank: int) -> bool:
            now_s = time.monotonic()
            if now_s < min(begun_s + self._timeout_s, self._ends_s):
                return False
            raise CheckpointError(
                "Processes were to agree on a save in the background.",
                f"There was no word from rank {rank} in {now_s - begun_s:.0f} s.",
                "Look for its error; allow more time with ddp_timeout.",
            )

        with temporarily(self, is_waiting=True):
            return bool(self._exchange("save", self._turn, flag, all, is_late))

    def expect_no_more(self) -> None:
        """Let a background save wait only seconds longer: another process is gone, and it ended its saves before."""
        self._ends_s = time.monotonic() + _ANSWER_S

    # -- the thread ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            for number in itertools.count():
                if not (self._wait_for(number) and self._take_part(number)):
                    return
        except Exception as error:
            # The board is not available any more, because the process that hosted it has ended.
            self._is_deaf = True
            if not self._closing.is_set():
                self._end_if_asked(f"the processes cannot reach each other any more ({error!r})")
            self._release()

    def _wait_for(self, number: int) -> bool:
        """Open a round, or wait until another process does; False if the training here ends first."""
        while not self._closing.is_set():
            if int(self._board.read("opened") or -1) >= number:
                return True
            if self._requests:
                self._board.post("opened", str(number))
                return True
            self._closing.wait(_POLL_S)
        return False

    def _take_part(self, number: int) -> bool:
        """Take part in a round, and wait until the main thread has acted on it; False if it was the last one."""
        self._is_known.clear()
        # In this order; see the class.
        self._raise_flag()
        note = [self._progress.step, strongest(set(self._requests))]
        decision = self._exchange("round", number, note, _decide, self._gives_up())
        if decision is None:
            return self._continue_alone()
        # In this order: at any time, one of the two shows a stop, see `unhandled_stop`.
        self._agreement = decision[0], int(decision[1])
        self._forget(decision[0])
        if self.on_stop is not None and decision[0] == "SIGTERM":
            self.on_stop()
        self._is_known.set()
        while not self._is_taken.wait(_POLL_S):
            if self._closing.is_set():
                return False
        self._is_taken.clear()
        return True

    def _gives_up(self) -> Callable[[int], bool]:
        """Return a function that tells whether a process will not post its note of a round."""
        begun_s = time.monotonic()

        def gives_up(rank: int) -> bool:
            waited_s = time.monotonic() - begun_s
            if waited_s > 2 * _ANSWER_S:
                self._end_if_asked(f"process {rank} does not answer")
            # Only the main process decides that a process is dead, so that all get the same answer.
            is_late = self.is_main and waited_s > _ANSWER_S
            return self._closing.is_set() or is_late or self._board.read(f"left/{rank}") is not None

        return gives_up

    def _continue_alone(self) -> bool:
        """Continue training after a round without a result; False if no further round can have one."""
        departures = [self._board.read(f"left/{rank}") for rank in range(self.world_size)]
        self._is_deaf = "failed" in departures
        if not self._closing.is_set() and (self._is_deaf or "ended" not in departures):
            self._end_if_asked("another process has failed or does not answer")
            if SAVE in self._requests:
                logger.warning("The requested save is skipped: another process does not respond.")
                self._requests.discard(SAVE)
        self._release()
        return not (self._closing.is_set() or any(departures))

    def _release(self) -> None:
        self._agreement = None
        self._lower_flag()
        self._is_known.set()

    def _end_if_asked(self, reason: str) -> None:
        """End this process at once if it must stop: its main thread may wait for the others forever."""
        stop = self.unhandled_stop()
        if stop is not None:
            logger.error("%s ends the process at once and nothing is saved: %s.", stop, reason)
            end_process(128 + signal.Signals[stop])

    # -- what all share ------------------------------------------------------------------------------------------

    def _exchange(
        self, topic: str, turn: int, value: Any, combine: Callable[[list[Any]], Any], gives_up: Callable[[int], bool]
    ) -> Any:
        """Return what the main process computes from the values of all processes; None if it posts nothing.

        Notes of a topic are overwritten, so their number does not grow. None is lost: the main process replaces its
        own after it has the next one of all others.
        """
        self._board.post(f"{topic}/{self.rank}", json.dumps([turn, value]))
        if self.is_main:
            result = combine([self._await(f"{topic}/{rank}", turn, rank, gives_up) for rank in range(self.world_size)])
            # A process that is leaving does not report that others are silent: it posts that it leaves.
            if result is not None or not self._closing.is_set():
                self._board.post(topic, json.dumps([turn, result]))
        return self._await(topic, turn, 0, gives_up)

    def _await(self, key: str, turn: int, sender: int, gives_up: Callable[[int], bool]) -> Any:
        pause_s = _FIRST_PAUSE_S
        while True:
            # Checked first: a process that has left posts nothing afterwards.
            is_over = gives_up(sender)
            posted_turn, value = json.loads(self._board.read(key) or "[-1, null]")
            if posted_turn == turn:
                return value
            if is_over or posted_turn > turn:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _forget(self, request: str | None) -> None:
        """Remove a request that `due` returned, and those that it includes."""
        strength = _STRENGTH.get(request or "", 0)
        self._requests -= {request, *(each for each, level in _STRENGTH.items() if level <= strength)}

    def _raise_flag(self) -> None:
        if self._act not in self._pending_calls:
            self._pending_calls.append(self._act)

    def _lower_flag(self) -> None:
        while self._act in self._pending_calls:
            self._pending_calls.remove(self._act)


def _decide(notes: list[Any]) -> tuple[str | None, int] | None:
    """Return what to do and after which step; None if a process has left, or does not answer."""
    if None in notes:
        return None
    return strongest(request for _, request in notes), 1 + max(step for step, _ in notes)
