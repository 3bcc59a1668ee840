"""Ranks as `torchrun` would start them, without its seconds: each forks from a process that has imported everything.

``python ranks.py`` is such a process: each line of standard input is an order for one rank, which ends as a script
does, uncaught errors and exit handlers included, but for what the interpreter does after them. Every rank has a
process of its own to fork from, so that the ranks' hashes differ as they do under a launcher. What a rank had to
import besides is imported where it was forked from, so that later ranks find it. What a launcher adds, a store that
outlives every rank and an end for the ranks that are left when one has failed, is done here.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # tests/, as pytest does
    atexit.register(lambda: _end_at_once())  # before all others, so that it is called last

from support import worker

# How long the ranks that are left may take to tell why they end, too.
_GRACE_S = 10.0
_servers: list[_Server] = []
_has_ended_well = False


class _Server:
    """A process to fork from, and the rank that it forked last."""

    def __init__(self) -> None:
        # Without a buffer, or an answer could lie in it where nobody waits for it.
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.pid: int | None = None

    def start(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        self.pid = self._answer()

    def status(self, wait_s: float) -> int | None:
        """Return how the rank ended, None if it has not after a while."""
        if not select.select([self._process.stdout], [], [], wait_s)[0]:
            return None
        self.pid = None
        return self._answer()

    def kill_rank(self) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill_rank()
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "The process that ranks are forked from has ended."
        return int(line)


def _end_at_once() -> None:
    """Leave out what follows the exit handlers: to free all that was imported, a rank would copy it first."""
    if _has_ended_well:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@atexit.register
def _close_all() -> None:
    while _servers:
        _servers.pop().close()


def run(where: Path, name: str, folder: Path, *, num_processes: int, timeout_s: float) -> tuple[int | None, str]:
    """Run a function of a test file on each rank, as `support.worker` does; leave no rank behind.

    Returns:
        The exit status of the rank that failed first, 0 if none did, None if the time ran out; and what they wrote.
    """
    from torch.distributed import TCPStore

    while len(_servers) < num_processes:
        _servers.append(_Server())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    servers, failure, deadline = _servers[:num_processes], 0, time.monotonic() + timeout_s
    try:
        for rank, server in enumerate(servers):
            env = dict(os.environ) | _variables(rank, num_processes, store.port)
            server.start({"where": str(where), "name": name, "folder": str(folder), "env": env})
        while running := [server for server in servers if server.pid is not None]:
            status = running[0].status(0.05) if len(running) == 1 else _first(running)
            if status and not failure:
                failure, deadline = status, min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() > deadline:
                for server in running:
                    server.kill_rank()
                if not failure:
                    return None, _outputs(folder) + f"\nKilled after {timeout_s} s."
    finally:
        if any(server.pid is not None for server in servers):
            _close_all()
    return failure, _outputs(folder)


def _first(running: list[_Server]) -> int | None:
    for server in running:
        status = server.status(0.02)
        if status is not None:
            return status
    return None


def _outputs(folder: Path) -> str:
    return "".join(path.read_text("utf-8", errors="replace") for path in sorted(folder.glob("rank_*.txt")))


def _variables(rank: int, num_processes: int, port: int) -> dict[str, str]:
    """Return what torchrun sets."""
    local = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0}
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), num_processes)
    elastic = {"TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in {**local, **sizes, **elastic, **place, "OMP_NUM_THREADS": 1}.items()}


def _become_rank(order: Mapping[str, Any], imports: IO[str]) -> None:
    before = set(sys.modules)

    @atexit.register
    def tell_imports() -> None:
        # Its file's own module, and what that imports from other tests, are to be as new in each rank.
        found = [name for name in sys.modules if name not in before and not name.startswith(("test_", "support"))]
        json.dump(found, imports)
        imports.flush()

    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["folder"])
    output = os.open(f"rank_{os.environ['RANK']}.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # or a process that the rank starts could read the next order
    sys.stdin = os.fdopen(0)


def _serve() -> dict[str, Any] | None:
    """Fork for each order; returns it in the rank, None in the server at the end."""
    answers = os.dup(1)
    os.dup2(2, 1)  # some modules print while they are imported
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        imports = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a rank leaves this function and writes to it at its end
        gc.freeze()  # or each rank would copy and search, at its end, all that is imported: that took most of its time
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            _become_rank(order, imports)
            return order
        os.write(answers, f"{pid}\n".encode())
        os.write(answers, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
        with imports:
            imports.seek(0)
            _import(imports.read())
    return None


def _import(told: str) -> None:
    """Import what a rank has imported, if it came to tell."""
    for name in json.loads(told or "[]"):
        # What it found on a path of its own, or made itself, is not here.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def main() -> None:
    """Import everything, then fork."""
    global _has_ended_well
    import accelerate.utils
    import torch._dynamo  # an optimizer's first step would import it, in every rank anew
    import torchmetrics

    import hftrain.trainer.trainer

    _ = accelerate.utils, torch._dynamo, torchmetrics, hftrain.trainer.trainer
    order = _serve()
    if order is not None:
        worker.main(order["where"], order["name"])
        _has_ended_well = True


if __name__ == "__main__":
    main()
