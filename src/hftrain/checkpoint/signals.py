"""Signals that ask a running training for something, and how it ends when it was stopped."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from hftrain.checkpoint.consensus import SAVE, Consensus
from hftrain.core.log import get_logger

logger = get_logger(__name__)

# Windows has no SIGUSR1.
_ASKED_BY = {"SIGTERM": "SIGTERM", "SIGINT": "SIGINT", "SIGUSR1": SAVE}
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
_HINT = b"\nInterrupted: the run stops after this step. Once more stops it at once.\n"


class TrainingStopped(SystemExit):
    """What `train()` raises when SIGTERM has stopped it: the process ends with 128 + the signal's number.

    Args:
        message: What happened.
        signum: The signal.
    """

    def __init__(self, message: str, *, signum: int) -> None:
        super().__init__(128 + signum)
        self.message = message

    def __str__(self) -> str:
        return self.message


def stopped_by(name: str, message: str) -> BaseException:
    """Return the exception that ends a run which a signal has stopped."""
    if name == "SIGINT":
        return KeyboardInterrupt(message)
    return TrainingStopped(message, signum=signal.Signals[name])


class SignalHandlers:
    """Turn signals into requests, for as long as the context lasts.

    SIGTERM and the first SIGINT ask for a stop, SIGUSR1 asks for a save; the second SIGINT interrupts at once. Only in
    the main thread, and only where the program has no handler of its own; what was there is put back.

    Args:
        consensus: What takes the requests.
    """

    def __init__(self, consensus: Consensus) -> None:
        self._consensus = consensus
        self._process = os.getpid()
        self._is_interrupted = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalHandlers:
        if threading.current_thread() is threading.main_thread():
            for name in _ASKED_BY:
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) in _DEFAULTS:
                    self._previous[number] = signal.signal(number, self._note)
                elif number is not None:
                    logger.info("%s is handled by the program itself, and asks nothing of the training.", name)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note what was asked, and no more: at this moment the process may be anywhere."""
        name = signal.Signals(number).name
        if os.getpid() != self._process:
            self._act_by_default(number)
        elif name == "SIGINT" and self._is_interrupted:
            signal.default_int_handler(number, frame)
        elif not self._consensus.ask(_ASKED_BY[name]):
            self._act_by_default(number)
        elif name == "SIGINT":
            self._is_interrupted = True
            # Not by a logger or a stream, which the handler may have interrupted.
            os.write(2, _HINT)

    def _act_by_default(self, number: int) -> None:
        """Do as if there were no handler: in a process forked from this one, or when nobody heeds requests."""
        signal.signal(number, self._previous[number])
        signal.raise_signal(number)
