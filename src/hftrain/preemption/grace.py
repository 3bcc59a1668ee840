"""SIGTERM for a run that may never reach its next step boundary: report what it waits for, and end it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from hftrain.core.log import get_logger
from hftrain.core.notes import user_line, waits_for_others

logger = get_logger(__name__)

# Messages other than signal numbers.
_CLOSE, _ELSEWHERE = 0, 255
_POLL_S, _LONGEST_POLL_S = 0.25, 5.0
_JOIN_S = _SAY_S = 1.0
# A launcher may forward a signal that the whole process group got: two within this time count as one.
_SAME_S, _SAME_UNDER_A_LAUNCHER_S = 0.5, 2.0
_ASK_S = 3.0
# An interrupted process exits after this time without progress.
LAST_S = 5.0
# Factors on the longest pause so far, and on the time while a checkpoint is written: flushing a large file to a slow
# disk shows no progress.
_FACTOR, _SAVING_FACTOR = 1.5, 5.0


class GracePeriod:
    """Report SIGTERM at once, and end a run that makes no progress afterwards.

    Python runs a signal handler only when the main thread returns to Python code, which never happens in a collective
    whose partner is gone. So a thread receives signals through the descriptor that `start` returns, to which Python's
    C code writes (`signal.set_wakeup_fd`).

    The time restarts whenever the run makes progress: a training micro-batch or an evaluation batch on any rank, or
    bytes of a checkpoint. After `grace_s` without progress, or at a second SIGTERM, `TrainingStopped` is raised in the
    main thread, wherever it is in Python code. If the run is not closed some seconds later, the thread ends the
    process.

    Args:
        grace_s: How long the run may make no progress; None for any time. Never shorter than 1.5 times its longest
            pause before the signal.
    """

    def __init__(self, grace_s: float | None) -> None:
        self._grace_s = grace_s
        self._main = threading.main_thread().ident or 0
        self._thread: threading.Thread | None = None

    def start(self, run: Any) -> int:
        """Start the thread for a run, given by its `Interrupts`; return the descriptor to write signal numbers to."""
        self._run, self._strategy = run, run.strategy
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="hftrain-grace", daemon=True)
        self._thread.start()
        return self._sender.fileno()

    def ring(self) -> None:
        """Notify the thread that another process must stop."""
        self._send(_ELSEWHERE)

    def close(self) -> None:
        """Stop the thread at the end of the run. Safe to call if it was never started."""
        if self._thread is None:
            return
        self._send(_CLOSE)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._thread = None
            self._receiver.close()
            self._sender.close()

    def _send(self, message: int) -> None:
        if self._thread is not None:
            with suppress(OSError):
                self._sender.send(bytes([message]))

    def _receive(self, timeout_s: float | None) -> int | None:
        self._receiver.settimeout(timeout_s)
        try:
            return self._receiver.recv(1)[0]
        except TimeoutError:
            return None

    # -- the thread ----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        longest_s = self._await_sigterm()
        if longest_s is None:
            return
        self._run.ask("SIGTERM")
        reason = self._wait(longest_s)
        if reason is not None:
            self._end(reason)

    def _await_sigterm(self) -> float | None:
        """Wait for SIGTERM, and return the longest pause of the run; None if the run ends first."""
        longest_s, is_under_way = 0.0, False
        pulse, changed_s = self._run.pulse(), time.monotonic()
        pause_s = None if self._grace_s is None else min(self._grace_s / 4, _LONGEST_POLL_S)
        while True:
            message = self._receive(pause_s)
            if message == _CLOSE:
                return None
            if message in (signal.SIGTERM, _ELSEWHERE):
                return longest_s
            latest, now_s = self._run.pulse(), time.monotonic()
            if latest != pulse:
                # Without the first step, which compiles and warms up.
                longest_s = max(longest_s, now_s - changed_s) if is_under_way else 0.0
                pulse, changed_s, is_under_way = latest, now_s, True

    def _wait(self, longest_s: float) -> str | None:
        """Wait until the run is closed, or return why it must be ended."""
        patience_s = None if self._grace_s is None else max(self._grace_s, _FACTOR * longest_s)
        limit = "" if patience_s is None else f"after {patience_s:.3g} s in which nothing gets on, or "
        same_s = _SAME_UNDER_A_LAUNCHER_S if "TORCHELASTIC_RUN_ID" in os.environ else _SAME_S
        self._say(
            f"SIGTERM: the run stops at the end of {self._place()}. It is interrupted {limit}by a second SIGTERM "
            f"(at least {same_s:g} s after the first)."
        )
        begun_s = changed_s = time.monotonic()
        pulse, is_hurried, has_asked = self._pulse(), False, False
        while True:
            message, now_s = self._receive(_POLL_S), time.monotonic()
            if message == _CLOSE:
                return None
            is_hurried = is_hurried or (message == signal.SIGTERM and now_s - begun_s > same_s)
            latest = self._pulse()
            if latest is not None and latest != pulse:
                pulse, changed_s = latest, now_s
            is_saving, quiet_s = self._run.is_saving(latest), now_s - changed_s
            if is_hurried and (not is_saving or quiet_s > LAST_S):
                return "a second SIGTERM came"
            if patience_s is not None and quiet_s > patience_s * (_SAVING_FACTOR if is_saving else 1.0):
                return f"nothing got on in {quiet_s:.3g} s"
            if not has_asked and quiet_s > min(_ASK_S, (patience_s or _ASK_S) / 2):
                has_asked = True
                self._say_who_is_missing()

    def _end(self, reason: str) -> None:
        """Interrupt the main thread; end the process if the run is not closed soon after."""
        place = self._place()
        self._say(f"SIGTERM interrupts {place}, because {reason}.")
        # The thread receives the interrupting signal, too.
        is_own_signal = self._run.handlers.interrupt(f"SIGTERM ended the training in {place}, because {reason}")
        pulse, changed_s = self._pulse(), time.monotonic()
        while time.monotonic() - changed_s < LAST_S:
            message = self._receive(_POLL_S)
            if message == _CLOSE:
                return
            if message == signal.SIGTERM and not is_own_signal:
                break
            is_own_signal = is_own_signal and message != signal.SIGTERM
            latest = self._pulse()
            if latest is not None and latest != pulse:
                pulse, changed_s = latest, time.monotonic()
        last_words = _call_within(_SAY_S, self._run.last_words) or ""
        self._say(f"SIGTERM ends the process at once: it is still in {self._place()}. {last_words}")
        end_process(128 + signal.SIGTERM)

    def _place(self) -> str:
        return f"{self._run.where()}, at {user_line(self._main)}"

    def _pulse(self) -> Any:
        return _call_within(_SAY_S, self._run.share_pulse)

    def _say_who_is_missing(self) -> None:
        watch = self._strategy.watch
        if watch is not None and waits_for_others(self._main):

            def say() -> None:
                problem, places = watch.missing()
                logger.warning("rank %d: %s: %s.", self._strategy.rank, problem, places)

            threading.Thread(target=say, name="hftrain-missing", daemon=True).start()

    def _say(self, text: str) -> None:
        """Log from another thread, because the log's pipe may be closed, and the main thread may hold its lock."""
        label = "" if self._strategy.world_size == 1 else f"rank {self._strategy.rank}: "
        _call_within(_SAY_S, lambda: logger.warning("%s%s", label, text))


def _call_within(limit_s: float, call: Callable[[], Any]) -> Any:
    """Return a function's result, or None if it fails or takes too long; it then continues unobserved."""
    results: list[Any] = []

    def work() -> None:
        with suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=work, name="hftrain-grace-call", daemon=True)
    thread.start()
    thread.join(limit_s)
    return results[0] if results else None


def end_process(status: int) -> NoReturn:
    """End this process at once, without handlers, flushing or cleanup; from any thread.

    For threads whose main thread waits in a call that never ends and that no exception can interrupt, such as a
    collective whose partner is gone.
    """
    os._exit(status)
