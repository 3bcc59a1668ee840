"""Real processes for tests: a function or a script under torchrun, its answers collected per rank."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from support import ranks

_WORKER = Path(__file__).with_name("worker.py")
# A launcher's variables would make the processes join a run they are not part of.
_LAUNCHER_ENV = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class DistributedRun:
    """How a launch ended.

    Args:
        returncode: torchrun's exit status; None when it was killed at its time limit.
        results: What each rank answered, by rank; None where a rank did not get that far.
        output: Standard output and error of all ranks and of torchrun, mixed.
        elapsed_s: Seconds from start to end.
    """

    returncode: int | None
    results: list[Any]
    output: str
    elapsed_s: float


def launch(
    target: Callable[..., Any] | str,
    folder: Path,
    *,
    num_processes: int = 2,
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 240.0,
    forks: bool = False,
) -> DistributedRun:
    """Run `target` in several processes, started by torchrun on a port of its own choice, or as it would start them.

    Args:
        target: A function at the top level of a test file, called as ``target(**kwargs)``; its return value (JSON)
            is the rank's answer. Or the text of a script, which assigns its answer to `result` and finds the
            keyword arguments in `kwargs`.
        folder: An empty folder; it becomes the processes' working directory.
        num_processes: How many.
        kwargs: Keyword arguments, as JSON.
        env: Environment variables to add.
        timeout_s: Seconds after which everything is killed.
        forks: Fork the ranks from processes that have imported everything (`support.ranks`) instead of calling
            torchrun, which costs seconds each time; only for a function, and where `env` is empty.
    """
    if callable(target):
        where, name = Path(inspect.getsourcefile(inspect.unwrap(target)) or ""), target.__qualname__
        if "<" in name or "." in name:
            raise ValueError(f"{name} must stand at the top level of its file, for other processes to find it.")
    else:
        where, name = folder / "script.py", ""
        where.write_text(target, encoding="utf-8")
    (folder / "kwargs.json").write_text(json.dumps(dict(kwargs or {})), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    started = time.monotonic()
    if forks and name and not env:
        returncode, output = ranks.run(where, name, folder, num_processes=num_processes, timeout_s=timeout_s)
    else:
        returncode, output = run_command([*command, str(_WORKER), str(where), name], folder, env or {}, timeout_s)
    results = [_read(folder / f"result_{rank}.json") for rank in range(num_processes)]
    return DistributedRun(returncode, results, output, time.monotonic() - started)


def run_command(
    command: list[str], folder: Path, env: Mapping[str, str], timeout_s: float = 240.0
) -> tuple[int | None, str]:
    """Run a command without a launcher's variables, leave neither it nor a descendant behind; return how it ended."""
    base = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_ENV}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**base, "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        return None, f"{output}\nKilled after {timeout_s} s."
    finally:
        if process.poll() is None:
            _kill(process)
            process.communicate()


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and its descendants; torchrun's workers have sessions of their own, so a group would not do."""
    for descendant in [*psutil.Process(process.pid).children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
