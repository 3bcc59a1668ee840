"""One background write, completed in the main thread at the same step on all processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from hftrain.core.errors import CheckpointError, explain
from hftrain.preemption.consensus import Consensus, Group

_ELSEWHERE = explain(
    "Cannot write a checkpoint in the background.",
    "Another process failed after its commit; see its error.",
    "Fix the cause, then resume from the newest checkpoint.",
)


class BackgroundWrite:
    """Run a piece of work in a separate thread, together with the same work on the other processes.

    Each process learns of the end at a different moment. If one raised at once, the others would wait for it in the
    next step's collective. So each process requests a step boundary, by the name of this write, at which all act.

    Args:
        name: What `Consensus.due` returns at the boundary at which all call `finish`; unique to this write.
        work: Called in the thread, with a group through which the processes agree.
        then: Called in the main thread with what the work returned, or its error; may raise.
        consensus: The object through which the processes agree.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Group], Path],
        then: Callable[[Path | None, BaseException | None], None],
        *,
        consensus: Consensus,
    ) -> None:
        self.name = name
        self._work, self._then, self._consensus = work, then, consensus
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        # A daemon, so that an interrupted process can exit without it.
        self._thread = threading.Thread(target=self._run, name="hftrain-save", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._is_over.is_set()

    def wait(self) -> BaseException | None:
        """Wait until the work has ended on all processes, and return its error without settling it."""
        # Not `join`: before Python 3.13, a thread counts as ended once its join was interrupted.
        self._is_over.wait()
        return self._error

    def finish(self) -> None:
        """Wait, and call `then`. All processes must call it at the same step, once."""
        self.wait()
        self._consensus.withdraw(self.name)
        self._then(self._path, self._error)

    def _run(self) -> None:
        try:
            self._path = self._work(self._consensus)
        except BaseException as error:  # of any kind, because the main thread raises it
            self._error = error
        try:
            if not self._consensus.all_true(self._error is None) and self._error is None:
                self._error = CheckpointError(_ELSEWHERE)
        except BaseException as error:
            self._error = self._error or error
        self._consensus.ask(self.name)
        self._is_over.set()
