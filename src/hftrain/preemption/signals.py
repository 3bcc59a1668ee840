"""Signals that stop a running training or make it save, and how it ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from hftrain.core.log import get_logger, warn_once
from hftrain.preemption.consensus import SAVE, Consensus

logger = get_logger(__name__)

# Windows has no SIGUSR1.
_REQUESTS = {"SIGTERM": "SIGTERM", "SIGINT": "SIGINT", "SIGUSR1": SAVE}
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
_NO_WAKEUP = -1
# Our descriptor to which Python's C code writes signals, if any: a forked process must not write its own to it.
_wakeup = _NO_WAKEUP
_HINT = b"\nInterrupted: the run stops after this step. Once more stops it at once.\n"


class TrainingStopped(SystemExit):
    """Raised by `train()` when SIGTERM has stopped it: the process exits with 128 + the signal's number.

    Args:
        is_early: Whether it was raised within a step, instead of at a step boundary.
    """

    def __init__(self, message: str, *, signum: int, is_early: bool = False) -> None:
        super().__init__(128 + signum)
        self.message, self.is_early = message, is_early

    def __str__(self) -> str:
        return self.message


def stopped_by(name: str, message: str) -> BaseException:
    """Return the exception that ends a run stopped by a signal."""
    if name == "SIGINT":
        return KeyboardInterrupt(message)
    return TrainingStopped(message, signum=signal.Signals[name])


class SignalHandlers:
    """Convert signals to requests, within the context.

    SIGTERM and the first SIGINT request a stop, SIGUSR1 requests a save; the second SIGINT interrupts at once. Only in
    the main thread, and only for signals without a handler of the program; previous handlers are restored.

    Args:
        listen: Returns a descriptor on which a thread receives signals that the main thread cannot handle; called if
            SIGTERM is handled here. None for no such thread.
    """

    def __init__(self, consensus: Consensus, listen: Callable[[], int] | None = None) -> None:
        self._consensus, self._listen = consensus, listen
        self._process = os.getpid()
        self._is_interrupted = False
        self._previous: dict[int, Any] = {}
        self._descriptor = self._wakeup = _NO_WAKEUP
        self._ending: TrainingStopped | None = None
        self._leaving = threading.Lock()

    def __enter__(self) -> SignalHandlers:
        if threading.current_thread() is threading.main_thread():
            for name in _REQUESTS:
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) in _DEFAULTS:
                    self._previous[number] = signal.signal(number, self._record_request)
                elif number is not None:
                    logger.info("%s is handled by the program itself; the training does not react to it.", name)
        else:
            warn_once(
                "SIGTERM, SIGINT and SIGUSR1 save nothing in this run: Python handles signals in the main thread only, "
                "and train() runs in another one. Call train() in the main thread, or set SavePolicy(on_signal=False)."
            )
        if signal.SIGTERM in self._previous and self._listen is not None:
            self._descriptor = self._listen()
            self._wakeup = _take_wakeup(self._descriptor)
        return self

    def __exit__(self, *error: object) -> None:
        with self._leaving:
            for number, handler in self._previous.items():
                if signal.getsignal(number) == self._record_request:
                    signal.signal(number, handler)
        _leave_wakeup(self._wakeup)

    def interrupt(self, message: str) -> bool:
        """Raise `TrainingStopped` in the main thread, when that is in Python code; from any thread.

        Sends SIGTERM to do so. Returns False and does nothing if another handler has been set for SIGTERM.
        """
        with self._leaving:
            is_ours = signal.getsignal(signal.SIGTERM) == self._record_request and hasattr(signal, "pthread_kill")
            if is_ours:
                self._ending = TrainingStopped(message, signum=signal.SIGTERM, is_early=True)
                # To the main thread itself; otherwise a blocking call there would continue.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            return is_ours

    def _record_request(self, signum: int, frame: FrameType | None) -> None:
        """Only record the request: the process may be interrupted anywhere."""
        name = signal.Signals(signum).name
        ending, self._ending = self._ending, None
        if os.getpid() != self._process:
            self._act_by_default(signum)
        elif ending is not None:
            raise ending
        elif name == "SIGTERM" and self._descriptor != self._wakeup:
            os.write(self._descriptor, bytes([signum]))  # because Python's C code writes to another descriptor
            self._consensus.ask(_REQUESTS[name])
        elif name == "SIGINT" and self._is_interrupted:
            signal.default_int_handler(signum, frame)
        elif not self._consensus.ask(_REQUESTS[name]):
            self._act_by_default(signum)
        elif name == "SIGINT":
            self._is_interrupted = True
            # Not with a logger or a stream, which the handler may have interrupted.
            os.write(2, _HINT)

    def _act_by_default(self, number: int) -> None:
        """Act as if there were no handler: in a process forked from this one, or when nothing handles requests."""
        signal.signal(number, self._previous[number])
        signal.raise_signal(number)


def _take_wakeup(descriptor: int) -> int:
    """Let Python's C code write signal numbers to this descriptor, unless another is set; return it, or -1."""
    global _wakeup
    old_descriptor = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if old_descriptor != _NO_WAKEUP:
        signal.set_wakeup_fd(old_descriptor)
        return _NO_WAKEUP
    _wakeup = descriptor
    return descriptor


def _leave_wakeup(descriptor: int) -> None:
    global _wakeup
    if descriptor != _NO_WAKEUP and _wakeup == descriptor:
        _wakeup = _NO_WAKEUP
        current = signal.set_wakeup_fd(_NO_WAKEUP)
        if current != descriptor:
            signal.set_wakeup_fd(current)


def _forget_wakeup() -> None:
    if _wakeup != _NO_WAKEUP:
        with suppress(ValueError):  # not in the main thread
            signal.set_wakeup_fd(_NO_WAKEUP)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_wakeup)
