"""Start several processes from one: for notebooks, tests and scripts without a launcher."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hftrain.core.errors import ConfigError, StrategyError
from hftrain.core.launcher import accelerate_state, read_launch
from hftrain.core.preserve import preserved_signals
from hftrain.strategies.distributed import spare_forked_processes
from hftrain.strategies.watch import is_broken_exchange

T = TypeVar("T")


def launch(
    function: Callable[..., T], *args: Any, num_processes: int, start_method: str | None = None, **kwargs: Any
) -> list[T]:
    """Call a function in several processes on this machine, started as by torchrun; return their results.

    Create the Trainer inside the function; it then finds its launcher as under torchrun. If one process fails, the
    others are terminated.

    Args:
        function: Called as ``function(*args, **kwargs)`` in each process.
        *args: Positional arguments; pickled for spawned processes, inherited by forked ones.
        num_processes: The number of processes.
        start_method: ``"fork"`` accepts functions defined in a notebook, but fails once this process has used a GPU;
            ``"spawn"`` needs a function in an importable file. None uses ``"fork"`` if possible.
        **kwargs: Keyword arguments, passed in the same way.

    Returns:
        The return values, by rank.

    Raises:
        ConfigError: The processes cannot be started with these arguments; none was started.
        StrategyError: A process failed; the message holds its traceback.

    Example:
        >>> launch(max, 3, 4, num_processes=1)
        [4]
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods() and not _has_used_gpu()
    method = start_method or ("fork" if can_fork else "spawn")
    _check(num_processes, method=method)
    if num_processes == 1:
        return [function(*args, **kwargs)]
    # Imported here because it is missing on some platforms and slow to import.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method=method,
        max_restarts=0,
        monitor_interval=0.1,
    )
    spare_forked_processes()
    with tempfile.TemporaryDirectory() as notes:
        try:
            with preserved_signals(), _preserved_environment():
                results = elastic_launch(config, _call)(function, notes, args, kwargs)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt(str(error)) from None
            raise
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            message: Any = failure.message
            trace = message if isinstance(message, str) else message["extraInfo"]["py_callstack"]
            # The first rank that failed with its own error has noted its traceback.
            first = min(Path(notes).iterdir(), key=lambda note: int(note.name.split()[0]), default=None)
            if first is not None:
                rank, trace = int(first.name.split()[1]), first.read_text(encoding="utf-8")
            raise StrategyError(
                f"Cannot finish launch({getattr(function, '__name__', function)!s}, num_processes={num_processes}).",
                f"The process of rank {rank} failed: {trace}",
            ) from error
    return [results[rank] for rank in range(num_processes)]


def _call(function: Callable[..., T], notes: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    # As under torchrun: Ctrl-C arrives once, through the launcher, and not at torch's handlers, which a fork inherits
    # and which would end a training without its checkpoint.
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Created before the fork, accelerate's state would not read this process's launch.
    for state in ("PartialState", "AcceleratorState", "GradientState") if accelerate_state("PartialState") else ():
        accelerate_state(state).clear()
    try:
        return function(*args, **kwargs)
    except Exception as error:
        # torch reports the first failed process that it polls, often one that only lost its connection to another.
        if not is_broken_exchange(error):
            # Processes on one machine share this monotonic clock; file times may go backwards.
            name = f"{time.monotonic_ns()} {read_launch().rank}"
            Path(notes, name).write_text(traceback.format_exc(), encoding="utf-8")
        raise


def _check(num_processes: int, *, method: str) -> None:
    problem = f"Cannot launch(num_processes={num_processes!r}, start_method={method!r})."
    if type(num_processes) is not int or num_processes < 1:
        raise ConfigError(
            f"Cannot use num_processes={num_processes!r}:", "the number of processes must be an integer above 0."
        )
    if read_launch().world_size > 1:
        raise ConfigError(
            problem,
            f"This process is one of {read_launch().world_size} already, that a launcher started.",
            "Start the script with plain python, or leave launch() out.",
        )
    if method == "fork" and dist.is_available() and dist.is_initialized():
        raise ConfigError(
            problem,
            "This process is in a process group, and forked processes would inherit that group: each would train "
            "alone, or wait forever.",
            "Close what made it first (trainer.strategy.close()), or use start_method='spawn'.",
        )
    if method == "fork" and _has_used_gpu():
        raise ConfigError(
            problem,
            "This process has used a GPU, which a forked one cannot use any more.",
            "Touch no GPU before launch(), or put the function into a file and use start_method='spawn'.",
        )


def _has_used_gpu() -> bool:
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and getattr(torch.get_device_module(found), "is_initialized", bool)()


@contextmanager
def _preserved_environment() -> Iterator[None]:
    names = set(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - names:
            del os.environ[name]
