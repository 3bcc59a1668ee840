"""What a test must leave as it found it: `Snapshot.take` before, `leaks` and `restore` after."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

# pytest and its plugins own these; KMP_* are OpenMP's, set by torch itself when a process forks or inits, and one is
# CUDA's, set by builds of torch with CUDA that look for a GPU.
_ENV_NOT_OURS = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "CUDA_MODULE_LOADING")
# Helpers of Python and of the tests, started once per process and stopped at its exit.
_PROCESSES_NOT_OURS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "support/ranks.py")
_OUTPUT_FOLDERS = ("runs", "trainer_output", "tmp_trainer")
_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")
_GRACE_S = 10.0


def _matmul_precision() -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.9 says, once in a process, that there are newer settings
            return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to answer while its two generations of settings disagree
        return "mixed"


def _set_matmul_precision(value: str) -> None:
    torch.set_float32_matmul_precision("highest" if value == "mixed" else value)


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


# Settings of the whole process that change what a later test computes: how to read and how to set each.
_FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch default device": (torch.get_default_device, torch.set_default_device),
    "torch grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch float32 matmul precision": (_matmul_precision, _set_matmul_precision),
    "torch deterministic algorithms": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    "torch number of threads": (torch.get_num_threads, torch.set_num_threads),
    "cudnn.enabled": _attribute(torch.backends.cudnn, "enabled"),
    "cudnn.deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "cudnn.benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cudnn.allow_tf32": _attribute(torch.backends.cudnn, "allow_tf32"),
    "logging level of hftrain": (lambda: logging.getLogger("hftrain").level, logging.getLogger("hftrain").setLevel),
    "working directory": (os.getcwd, os.chdir),
    "sys.excepthook": _attribute(sys, "excepthook"),
}
for _name in _SIGNALS:
    if hasattr(signal, _name):  # Windows knows only some
        _number = getattr(signal, _name)
        _FLAGS[f"handler of {_name}"] = (
            lambda number=_number: signal.getsignal(number),
            lambda handler, number=_number: signal.signal(number, handler),
        )


@dataclass(frozen=True)
class Snapshot:
    """What one moment looked like."""

    env: dict[str, str]
    flags: dict[str, Any]
    handlers: tuple[logging.Handler, ...]
    threads: frozenset[threading.Thread]
    processes: dict[int, str]
    files: frozenset[str]
    has_process_group: bool

    @classmethod
    def take(cls, folder: Path) -> Snapshot:
        """Look at this process and at the top of `folder`."""
        return cls(
            env=_env(),
            flags={name: read() for name, (read, _) in _FLAGS.items()},
            handlers=tuple(logging.getLogger("hftrain").handlers),
            threads=frozenset(_threads()),
            processes=_processes(),
            files=frozenset(_files(folder)),
            has_process_group=_has_process_group(),
        )

    def leaks(self, folder: Path) -> list[str]:
        """Name what differs now; threads and processes that are just ending get a moment to do so."""
        running, deadline = self._running(), time.monotonic() + _GRACE_S
        while running and time.monotonic() < deadline:
            # A loader's workers end when its iterator is collected. Without its queues, which would be collected first,
            # it could not tell them to, and would wait five seconds for each.
            queues = [each._index_queues for each in gc.get_objects() if type(each) is _MultiProcessingDataLoaderIter]
            gc.collect()
            del queues
            time.sleep(0.02)
            running = self._running()
        found = [f"environment variable {name}" for name in _changed(self.env, _env())]
        found += [
            f"{name}: {self.flags[name]!r} became {read()!r}"
            for name, (read, _) in _FLAGS.items()
            if read() != self.flags[name]
        ]
        found += running
        if tuple(logging.getLogger("hftrain").handlers) != self.handlers:
            found.append("a handler of the hftrain logger")
        found += [f"file or folder {name}" for name in sorted(set(_files(folder)) - self.files)]
        if _has_process_group() and not self.has_process_group:
            found.append("an initialised torch.distributed process group")
        return found

    def restore(self) -> None:
        """Put back what can be put back, so that only the test that leaks fails; files and threads stay."""
        for name in _changed(self.env, _env()):
            os.environ.pop(name, None)
            if name in self.env:
                os.environ[name] = self.env[name]
        for name, (read, write) in _FLAGS.items():
            if read() != self.flags[name]:
                write(self.flags[name])
        logging.getLogger("hftrain").handlers[:] = self.handlers
        for pid in set(_processes()) - set(self.processes):
            psutil.Process(pid).kill()
        if _has_process_group() and not self.has_process_group:
            torch.distributed.destroy_process_group()

    def _running(self) -> list[str]:
        threads = [f"thread {thread.name}" for thread in _threads() if thread not in self.threads]
        processes = _processes()
        return threads + [f"process {pid}: {processes[pid]}" for pid in processes if pid not in self.processes]


def _env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_ENV_NOT_OURS)}


def _changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if not thread.daemon]


def _processes() -> dict[int, str]:
    """Map the living descendants of this process to their command lines."""
    multiprocessing.active_children()  # reaps those that have ended
    found: dict[int, str] = {}
    if not _has_child():
        return found
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and not any(own in command for own in _PROCESSES_NOT_OURS):
                found[process.pid] = command[:200]
        except psutil.NoSuchProcess:
            continue
    return found


def _has_child() -> bool:
    """Tell whether there is any child at all; a thousand times quicker than looking through the process table."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    except AttributeError:  # Windows and some versions of macOS have no waitid
        return True
    return True


def _files(folder: Path) -> list[str]:
    """List the visible entries at the top of a folder, and those of the folders that runs write to by default."""
    found = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    for name in _OUTPUT_FOLDERS:
        found += [f"{name}/{entry.name}" for entry in folder.glob(f"{name}/*")]
    return [name for name in found if name != "__pycache__"]


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
