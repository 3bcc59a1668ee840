"""One write in the background, and its end in the main thread: at the same step in all processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from hftrain.checkpoint.consensus import Consensus, Group
from hftrain.core.errors import CheckpointError, explain

_ELSEWHERE = explain(
    "A checkpoint should be written in the background.",
    "Another process failed after its commit; see its error.",
    "Mend the cause, then resume from the newest checkpoint.",
)


class BackgroundWrite:
    """Do a piece of work in a thread of its own from now on, in step with the same work in the other processes.

    Each process learns of the end at another moment. Acting on it at once would part them: one raises, and the others
    wait for it in the next step's exchange. So each asks for a boundary at which all act, by the name of this write.

    Args:
        name: What `Consensus.due` returns at the boundary at which all call `finish`; no other write's.
        work: Called in the thread, with a group to agree through.
        settle: Called in the main thread with what the work returned, or its error; may raise.
        consensus: The processes'.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Group], Path],
        settle: Callable[[Path | None, BaseException | None], None],
        *,
        consensus: Consensus,
    ) -> None:
        self.name = name
        self._work, self._settle, self._consensus = work, settle, consensus
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        # A daemon: an interrupted process must be able to end without it.
        self._thread = threading.Thread(target=self._run, name="hftrain-save", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._is_over.is_set()

    def wait(self) -> BaseException | None:
        """Return when the work has ended in all processes, and return its error, unsettled."""
        # Not by `join`: until Python 3.13 a thread counts as ended once its join was interrupted.
        self._is_over.wait()
        return self._error

    def finish(self) -> None:
        """Wait, and settle. All processes must call it at the same step, once."""
        self.wait()
        self._consensus.withdraw(self.name)
        self._settle(self._path, self._error)

    def _run(self) -> None:
        try:
            self._path = self._work(self._consensus)
        except BaseException as error:  # whatever it is, the main thread has to know
            self._error = error
        try:
            if not self._consensus.all_true(self._error is None) and self._error is None:
                self._error = CheckpointError(_ELSEWHERE)
        except BaseException as error:
            self._error = self._error or error
        self._consensus.ask(self.name)
        self._is_over.set()
