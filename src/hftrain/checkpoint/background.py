"""One write in the background, and its end in the main thread: at the same step in all processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hftrain.checkpoint.manager import Group
from hftrain.core.errors import CheckpointError, explain

_ELSEWHERE = explain(
    "A checkpoint should be written in the background.",
    "Another process failed after its commit; see its error.",
    "Mend the cause, then resume from the newest checkpoint.",
)

Settle = Callable[[Path | None, BaseException | None], None]


class Agreeing(Group, Protocol):
    """Processes that agree from any thread."""

    def largest(self, number: int) -> int:
        """Return the largest of all processes' numbers."""


class BackgroundWrite:
    """Do a piece of work in a thread of its own from now on, in step with the same work in the other processes.

    Each process learns of the end at another moment. Acting on it at once would part them: one raises, and the others
    wait for it in the next step's exchange. So each says before which step's end it cannot act, and all act at the
    last of these.

    Args:
        work: Called in the thread, with a group to agree through.
        settle: Called in the main thread with what the work returned, or its error; may raise.
        group: The processes.
        read_step: Tells which step is done; the main thread alone changes it.
        pending: What the loop calls at each step's end, see `FitParts`.
    """

    def __init__(
        self,
        work: Callable[[Group], Path],
        settle: Settle,
        *,
        group: Agreeing,
        read_step: Callable[[], int],
        pending: list[Callable[[], None]],
    ) -> None:
        self._work, self._settle = work, settle
        self._group, self._read_step, self._pending = group, read_step, pending
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._due_step = 0
        self._knows_due = threading.Event()
        # A daemon: an interrupted process must be able to end without it.
        self._thread = threading.Thread(target=self._run, name="hftrain-save", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to wait for."""
        return not self._thread.is_alive()

    def wait(self) -> BaseException | None:
        """Return when the work has ended in all processes, and return its error, unsettled."""
        self._thread.join()
        return self._error

    def finish(self) -> None:
        """Wait, and settle unless that is done. All processes must call it at the same step."""
        self.wait()
        if self._look in self._pending:
            self._pending.remove(self._look)
            self._settle(self._path, self._error)

    def _run(self) -> None:
        try:
            self._path = self._work(self._group)
        except BaseException as error:  # whatever it is, the main thread has to know
            self._error = error
        # First this: from here on the main thread goes no further than the next step's end without an answer.
        self._pending.append(self._look)
        try:
            if self._group.world_size > 1:
                self._due_step = self._group.largest(self._read_step() + 1)
                if not self._group.all_true(self._error is None) and self._error is None:
                    self._error = CheckpointError(_ELSEWHERE)
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._knows_due.set()

    def _look(self) -> None:
        self._knows_due.wait()
        if self._read_step() >= self._due_step:
            self.finish()
