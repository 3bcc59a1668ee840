"""Connections to rank 0 over the loopback; a network that breaks: tests/machines/test_links.py."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from hftrain import ConfigError
from hftrain.preemption.consensus import Board
from hftrain.strategies.links import VARIABLE, Links, link_timeout_s


class Bed:
    """Three ranks' links in one process, which share a board, and what they told of each other."""

    def __init__(self) -> None:
        self.board, self.told = Board(), list[str]()
        self.links = [Links(self.board, rank=rank, timeout_s=30, on_lost=self.told.append) for rank in range(3)]

    def peers(self) -> int:
        """Return to how many ranks rank 0 is connected."""
        found = [key.data for key in self.links[0]._selector.get_map().values()]
        return sum("_watch" in getattr(each, "__qualname__", "") for each in found)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    bed = Bed()
    until(lambda: bed.peers() == 2)
    yield bed
    for each in reversed(bed.links):
        each.close()


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_rank_that_leaves_is_not_told_of_and_the_others_stay(bed: Bed) -> None:
    bed.links[2].close()
    until(lambda: bed.peers() == 1)
    assert bed.told == []


def test_rank_0_may_leave_first(bed: Bed) -> None:
    bed.links[0].close()
    until(lambda: len(bed.links[1]._selector.get_map() or ()) <= 1)
    assert bed.told == []


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has other options")
def test_both_ends_let_the_system_ask_within_the_time(bed: Bed) -> None:
    def ends() -> list[socket.socket]:
        keys = [key for each in bed.links for key in each._selector.get_map().values()]
        return [key.fileobj for key in keys if "_watch" in getattr(key.data, "__qualname__", "")]  # type: ignore[misc]

    until(lambda: len(ends()) == 4)
    for end in ends():
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        assert [end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names] == [10, 5, 4, 30_000]


def test_connection_that_breaks_is_told_of_once_with_its_rank_and_host(bed: Bed) -> None:
    address, port, token, _ = json.loads(bed.board.read("links") or "")
    souths = [socket.create_connection((address, port)) for _ in range(2)]
    for rank, south in enumerate(souths, start=7):
        south.sendall(json.dumps([token, rank, "south"]).encode())
        until(lambda wanted=rank - 4: bed.peers() == wanted)  # type: ignore[misc]
        # Closed so, it sends a reset, as a machine does that has been started again.
        south.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for south in souths:
        south.close()
    until(lambda: bool(bed.told))
    assert bed.told == ["rank 7 on south is gone: its machine has not answered for 30 s (Connection reset by peer)"]


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\n\r\n", b'["wrong", 1, "south"]', b"\xff", b"12"])
def test_strangers_are_sent_away(bed: Bed, hello: bytes) -> None:
    _, port, *_ = json.loads(bed.board.read("links") or "")
    with socket.create_connection(("localhost", port), timeout=20) as stranger:
        stranger.sendall(hello)
        assert stranger.recv(1) == b""
    assert bed.peers() == 2


def test_rank_that_cannot_connect_warns_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    board = Board()
    with socket.create_server(("localhost", 0)) as closed:
        port = closed.getsockname()[1]
    board.post("links", json.dumps(["localhost", port, "token", "north"]))
    links = Links(board, rank=1, timeout_s=30, on_lost=pytest.fail)
    until(lambda: bool(caplog.records))
    links.close()
    assert f"set {VARIABLE}=0" in caplog.text


def test_environment_sets_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert link_timeout_s() == 30
    monkeypatch.setenv(VARIABLE, "0")
    assert link_timeout_s() == 0
    monkeypatch.setenv(VARIABLE, "120")
    assert link_timeout_s() == 120


@pytest.mark.parametrize("value", ["soon", "-1", "2", "nan", "inf"])
def test_other_values_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match="number of seconds from 3 to 86400"):
        link_timeout_s()
