"""Connections between ranks that detect unreachable machines."""

from __future__ import annotations

import ipaddress
import json
import os
import selectors
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.preemption.consensus import Board

VARIABLE = "HFTRAIN_LINK_TIMEOUT_S"
_TIMEOUT_S = 30.0
_LOOK_S = 0.2
_JOIN_S = 2.0
_HELLO_BYTES = 1024
_BACKLOG = 4096

logger = get_logger(__name__)


class Links:
    """Connect every rank to rank 0 by a TCP connection that carries only keep-alive packets.

    The kernel acknowledges them even if the process is busy, holds the GIL or is stopped by a debugger, so only a
    machine that is down or unreachable is detected. A process that exits closes its connection, which is not an error
    here: its launcher and the next collective report the cause.

    Args:
        board: The board on which rank 0 posts its address.
        timeout_s: How long a machine may be silent.
        on_lost: Called in a thread with a message about the first unreachable rank; at most once.
    """

    def __init__(self, board: Board, *, rank: int, timeout_s: float, on_lost: Callable[[str], None]) -> None:
        self._board, self._rank, self._timeout_s, self._on_lost = board, rank, timeout_s, on_lost
        self._token = ""
        self._is_over = False
        self._bell, self._ear = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hftrain-links", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the connections, which tells the other ranks that this process exits."""
        self._is_over = True
        self._bell.close()
        self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        family, address = _own_address()
        self._token = uuid.uuid4().hex
        is_ipv6 = family == socket.AF_INET6
        listener = socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=is_ipv6)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        note = [address, listener.getsockname()[1], self._token, socket.gethostname()]
        self._board.post("links", json.dumps(note))

    def _run(self) -> None:
        try:
            if self._rank == 0:
                self._serve()
            else:
                self._connect()
            while not self._is_over:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        key.data(key.fileobj)
        except (OSError, RuntimeError, ValueError) as error:
            if not self._is_over:
                logger.warning(
                    "Rank %d has no connection that watches whether rank 0 can be reached (%s). If the network between "
                    "them breaks, a collective waits until ddp_timeout. Allow connections between the machines, or "
                    "set %s=0.",
                    self._rank,
                    error,
                    VARIABLE,
                )
        finally:
            for each in [*self._selector.get_map().values()]:
                _hang_up(each.fileobj)
            self._selector.close()

    def _connect(self) -> None:
        note = None
        while note is None:
            if self._is_over:
                return
            time.sleep(_LOOK_S)
            note = self._board.read("links")
        address, port, token, host = json.loads(note)
        connection = socket.create_connection((address, port), timeout=self._timeout_s)
        self._keep_alive(connection)
        connection.sendall(json.dumps([token, self._rank, socket.gethostname()]).encode())
        self._watch(connection, f"rank 0 on {host}")

    def _accept(self, listener: Any) -> None:
        connection, _ = listener.accept()
        self._keep_alive(connection)
        self._selector.register(connection, selectors.EVENT_READ, self._greet)

    def _greet(self, connection: Any) -> None:
        """Read a new connection's greeting; reject clients without the token."""
        try:
            token, rank, host = json.loads(connection.recv(_HELLO_BYTES))
        except (OSError, ValueError, TypeError):
            token = None
        self._selector.unregister(connection)
        if token == self._token:
            self._watch(connection, f"rank {rank} on {host}")
        else:
            _hang_up(connection)

    def _watch(self, connection: socket.socket, name: str) -> None:
        self._selector.register(connection, selectors.EVENT_READ, lambda each: self._hear(each, name))

    def _hear(self, connection: Any, name: str) -> None:
        """Drop a connection that was closed; report one that is broken."""
        try:
            connection.recv(1)
        except OSError as error:
            silent = f"its machine has not answered for {self._timeout_s:g} s ({error.strerror})"
            if not self._is_over:
                self._is_over = True
                self._on_lost(f"{name} is gone: {silent}")
        else:
            self._selector.unregister(connection)
            _hang_up(connection)

    def _keep_alive(self, connection: socket.socket) -> None:
        """Enable keep-alive probes after a third of the timeout, then after every sixth."""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle_option = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
        sixth_s = max(1, round(self._timeout_s / 6))
        options = {idle_option: 2 * sixth_s, "TCP_KEEPINTVL": sixth_s, "TCP_KEEPCNT": 4}
        # For data that was just sent and is not acknowledged.
        options["TCP_USER_TIMEOUT"] = round(1000 * self._timeout_s)
        for option, value in options.items():
            with suppress(AttributeError, OSError):  # no system supports all options
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def link_timeout_s() -> float:
    """Return the environment's limit for how long a machine may be silent; 0 disables the check.

    Raises:
        ConfigError: The variable is not a valid number of seconds.
    """
    value = os.environ.get(VARIABLE, str(_TIMEOUT_S))
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not (seconds == 0 or 3 <= seconds <= 86_400):
        raise ConfigError(
            f"The environment variable {VARIABLE} is set.",
            "It must hold a number of seconds from 3 to 86400, or 0 for no watch.",
            "Change it, or unset it for the default of 30.",
            **{VARIABLE: value},
        )
    return seconds


def _own_address() -> tuple[socket.AddressFamily, str]:
    """Return this machine's address on the network route to the store, where other ranks can reach it."""
    store = os.environ["MASTER_ADDR"]
    family, _, _, _, address = socket.getaddrinfo(store, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        ip = probe.getsockname()[0]
    # If the store is on this machine, use its name, which other machines can resolve; the IP may be a loopback address.
    return family, store if ip == address[0] or ipaddress.ip_address(ip).is_loopback else ip


def _hang_up(connection: Any) -> None:
    """Shut down a connection at both ends, even if a forked process still holds it open."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
