"""Many real processes quickly: one that has imported everything forks for each call, and may be killed."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

_SERVER = Path(__file__).with_name("fork_server.py")


@dataclass
class Fork:
    """One call: the processes that run it, and once they have ended how.

    Args:
        pids: The processes, by rank.
        statuses: Exit statuses by rank, the negative of a signal's number where one ended it; empty before `wait`.
        results: What the function returned, by rank; None where it did not get that far.
        output: What the processes wrote.
    """

    pids: list[int]
    statuses: list[int] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    output: str = ""


def kill(pid: int) -> None:
    """End a process at once, if it has not ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class ForkServer:
    """Call a function at the top level of a test file in processes of their own, one call at a time.

    Args:
        target: The function; keyword arguments and return value are JSON.
    """

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target
        self._stem = ""
        self._fork: Fork | None = None

    def __enter__(self) -> ForkServer:
        self._folder = tempfile.TemporaryDirectory()
        command = [sys.executable, str(_SERVER), inspect.getsourcefile(self._target) or "", self._target.__qualname__]
        paths = [str(_SERVER.parents[1]), os.environ.get("PYTHONPATH", "")]  # tests/, as pytest does
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pid in self._fork.pids if self._fork is not None and not self._fork.statuses else ():
            kill(pid)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()
        self._folder.cleanup()

    def start(
        self, *, envs: list[dict[str, str]] | None = None, memory_bytes: int | None = None, **kwargs: Any
    ) -> Fork:
        """Start a call.

        Args:
            envs: Environment variables of each process; by default there is one process.
            memory_bytes: How much more memory than at the start each may reserve.
            **kwargs: The function's arguments.
        """
        self._stem = str(Path(self._folder.name) / "call")
        for left in Path(self._folder.name).iterdir():
            left.unlink()
        order = {"kwargs": kwargs, "envs": envs or [{}], "memory_bytes": memory_bytes, "stem": self._stem}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        self._fork = Fork(self._read())
        return self._fork

    def has_ended(self) -> bool:
        """Tell whether the processes of the call that was started last have ended."""
        assert self._server.stdout is not None
        return bool(select.select([self._server.stdout], [], [], 0)[0])

    def wait(self) -> Fork:
        """Return the call that was started last, when its processes have ended."""
        assert self._fork is not None
        found = self._fork
        found.statuses = self._read()
        for number in range(len(found.pids)):
            answer, log = Path(f"{self._stem}.{number}.json"), Path(f"{self._stem}.{number}.log")
            found.results.append(json.loads(answer.read_text("utf-8")) if found.statuses[number] == 0 else None)
            found.output += log.read_text("utf-8", errors="replace") if log.exists() else ""
        return found

    def call(self, **options: Any) -> Any:
        """Start a call of one process, and return its answer when it has ended well."""
        self.start(**options)
        ended = self.wait()
        assert ended.statuses == [0], f"Exit status {ended.statuses}:\n{ended.output}"
        return ended.results[0]

    def _read(self) -> Any:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "The server has ended."
        return json.loads(line)
