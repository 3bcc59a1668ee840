"""Signals of this very process, turned into requests."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

import pytest

from hftrain.core.state import Progress
from hftrain.preemption.consensus import Board, Consensus
from hftrain.preemption.signals import SignalHandlers, TrainingStopped
from hftrain.strategies.single import SingleDeviceStrategy

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has other signals")


def make_requests(kind: type[Consensus] = Consensus) -> Consensus:
    alone = SingleDeviceStrategy()
    return kind(lambda: None, [], group=alone, board=Board(), progress=Progress(), timeout_s=1.0)


def send(name: str) -> None:
    os.kill(os.getpid(), signal.Signals[name])


def test_second_interrupt_is_one() -> None:
    with SignalHandlers(make_requests()):
        send("SIGINT")
        with pytest.raises(KeyboardInterrupt):
            send("SIGINT")


def test_second_termination_changes_nothing() -> None:
    requests = make_requests()
    with SignalHandlers(requests):
        send("SIGTERM")
        send("SIGTERM")
    assert requests.due(1) == "SIGTERM"


def test_handler_of_the_program_stays() -> None:
    heard: list[Any] = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    requests = make_requests()
    try:
        with SignalHandlers(requests):
            send("SIGTERM")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [1]
    assert requests.due(1) is None


def test_handler_set_meanwhile_stays() -> None:
    before = signal.getsignal(signal.SIGTERM)
    own = lambda *_: None  # noqa: E731
    with SignalHandlers(make_requests()):
        signal.signal(signal.SIGTERM, own)
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, before)


def test_another_thread_than_the_main_one_sets_no_handler_and_says_so() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with pytest.warns(UserWarning, match="SIGUSR1 save nothing in this run"), SignalHandlers(make_requests()):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_signal_that_nobody_would_heed_acts_by_default() -> None:
    class Deaf(Consensus):
        def ask(self, what: str) -> bool:
            return False

    with SignalHandlers(make_requests(Deaf)), pytest.raises(KeyboardInterrupt):
        send("SIGINT")


def test_forked_process_ends_by_the_signal_as_ever() -> None:
    with SignalHandlers(make_requests()):
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_a_thread_hears_of_signals_but_not_of_those_of_forked_processes() -> None:
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    ear.settimeout(10.0)
    # torch handles it in a process that has had loader workers, and then it is told of, too.
    of_children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with SignalHandlers(make_requests(), mouth.fileno):
        assert signal.set_wakeup_fd(mouth.fileno()) == mouth.fileno()
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        send("SIGUSR1")
        assert ear.recv(10) == bytes([signal.SIGUSR1])
    assert signal.set_wakeup_fd(-1) == -1
    signal.signal(signal.SIGCHLD, of_children)
    ear.close()
    mouth.close()


def test_a_descriptor_of_the_program_stays_and_the_handler_tells_instead() -> None:
    ear, mouth = socket.socketpair()
    theirs, there = socket.socketpair()
    for each in (mouth, there):
        each.setblocking(False)
    signal.set_wakeup_fd(there.fileno())
    try:
        requests = make_requests()
        with SignalHandlers(requests, mouth.fileno):
            send("SIGTERM")
            assert ear.recv(10) == theirs.recv(10) == bytes([signal.SIGTERM])
            assert requests.due(1) == "SIGTERM"
    finally:
        assert signal.set_wakeup_fd(-1) == there.fileno()
        for each in (ear, mouth, theirs, there):
            each.close()


def test_another_thread_can_stop_the_main_one() -> None:
    with SignalHandlers(make_requests()) as handlers:
        threading.Timer(0.05, handlers.interrupt, ["enough"]).start()
        with pytest.raises(TrainingStopped, match="enough") as stopped:
            time.sleep(30.0)
        assert (stopped.value.is_early, stopped.value.code) == (True, 143)
    assert not handlers.interrupt("too late")
