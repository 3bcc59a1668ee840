"""Loader workers: what can be sent to them, and the error about one that dies or hangs."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from multiprocessing.reduction import ForkingPickler
from pickle import dumps
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset

from hftrain.core.errors import ConfigError, StrategyError, listed
from hftrain.core.log import warn_once
from hftrain.core.tree import map_tensors
from hftrain.data.datasets import whole_dataset
from hftrain.data.samplers import samplers_of
from hftrain.data.seeding import SeededBatches, dump_signal

_THEIRS = "torch.utils.data._utils.signal_handling"
_FETCHERS = ("torch.utils.data._utils.fetch", "torch.utils.data.dataset")
_OF_A_WORKER = re.compile(r"DataLoader worker|DataLoader timed out")
_PIDS = re.compile(r"pid(?:\(s\))? ([\d, ]+)")
_DUMP_S = _JOIN_S = 0.2
_MOST_SAMPLES = 8


class WorkerDeaths:
    """Let a loader report its worker's death when it waits for a batch, not torch's SIGCHLD handler at any point.

    That handler raises in the main thread: in a save, in an optimizer's step, in an evaluation, whose state is
    intact. Loaders check their workers, too: every 5 s while they wait, or when the loader's `timeout` is over. A
    handler that the program installed before torch's is still called by torch's, and one that was installed later is
    not replaced.
    """

    def __init__(self) -> None:
        self._theirs: Any = None

    def watch(self) -> None:
        """Replace torch's handler, if it is installed; called whenever a loader has started."""
        if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
            return
        found = signal.getsignal(signal.SIGCHLD)
        if getattr(found, "__module__", None) == _THEIRS:
            self._theirs = found
            signal.signal(signal.SIGCHLD, self._hear)

    def close(self) -> None:
        """Restore torch's handler."""
        if self._theirs is not None and signal.getsignal(signal.SIGCHLD) == self._hear:
            signal.signal(signal.SIGCHLD, self._theirs)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        try:
            self._theirs(number, frame)
        except RuntimeError as error:
            if not _OF_A_WORKER.match(str(error)):
                raise


def noticing_copies(loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """Return the same batches; warn if each worker of a stream's loader reads the whole stream.

    Workers take turns. If all of them give the same batch, and in the next round the same other batch, each of them
    reads the same data. Batches are compared until two differ.
    """
    num_workers, dataset = getattr(loader, "num_workers", 0), getattr(loader, "dataset", None)
    if num_workers < 2 or not isinstance(dataset, IterableDataset):
        return batches
    return chain(_compared(batches, num_workers, dataset), batches)


def _compared(batches: Iterator[Any], num_workers: int, dataset: Any) -> Iterator[Any]:
    rounds: list[bytes] = []
    for number, batch in enumerate(islice(batches, 2 * num_workers)):
        try:
            content = dumps(map_tensors(batch, _content))
        except Exception:  # a batch whose content cannot be compared
            content = b""
        yield batch
        is_new = number % num_workers == 0
        if not content or (content in rounds if is_new else content != rounds[-1]):
            return
        rounds += [content] if is_new else []
    if number == 2 * num_workers - 1:
        warn_once(
            f"Each of the {num_workers} loader workers reads the whole {type(whole_dataset(dataset)).__name__}, so "
            f"each sample is trained on {num_workers} times per epoch. Let its __iter__ return the share that "
            "torch.utils.data.get_worker_info() asks for, or set dataloader_num_workers=1."
        )


def _content(tensor: torch.Tensor) -> bytes:
    # Not pickled: that would include the place in memory.
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def report_worker(error: BaseException) -> None:
    """Raise `StrategyError` instead of torch's error about a worker that died or timed out.

    Raises:
        StrategyError: Names the worker, its signal, and the samples that it was loading.
    """
    is_told = isinstance(error, RuntimeError) and _OF_A_WORKER.match(str(error))
    # A batch that a dead worker left in the queue can no longer be opened.
    if not is_told and not isinstance(error, (ConnectionError, EOFError, FileNotFoundError)):
        return
    iterator, pids = _iterator_in(error.__traceback__), _pids(error)
    info = getattr(iterator, "_task_info", {})
    for number, worker in enumerate(getattr(iterator, "_workers", ())):
        if is_told and not pids:
            if number == info.get(iterator._rcvd_idx, [None])[0]:
                raise _hung(iterator, number, worker) from error
            continue
        if not is_told or worker.pid in pids:
            worker.join(_JOIN_S)  # otherwise its exit status may be unknown
        if worker.exitcode and (not is_told or worker.pid in pids):
            raise _died(iterator, number, worker) from error


def _died(iterator: Any, number: int, worker: Any) -> StrategyError:
    code = worker.exitcode
    name = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
    reason, remedy = "", "Set dataloader_num_workers=0 to see the error where it happens."
    fewer = "Use fewer workers (dataloader_num_workers), a smaller dataloader_prefetch_factor, or smaller samples."
    if name == "SIGKILL":
        reason, remedy = " Memory is the likely cause: the kernel kills with SIGKILL what does not fit.", fewer
    elif name == "SIGBUS":
        reason = " Shared memory is the likely cause: batches travel through /dev/shm."
        remedy = f"Give it more room (docker run --shm-size). {fewer}"
    elif name == "SIGSEGV":
        reason = " Native code that the dataset or the collator calls has crashed."
    return StrategyError(
        f"Loader worker {number} (pid {worker.pid}) ended with {name}.",
        f"{_open_batch(iterator, number)}{reason}",
        remedy,
    )


def _hung(iterator: Any, number: int, worker: Any) -> StrategyError:
    stack = ""
    number_to_dump = dump_signal(getattr(iterator, "_worker_init_fn", None))
    if number_to_dump is not None:
        with suppress(OSError):
            os.kill(worker.pid, number_to_dump)
            time.sleep(_DUMP_S)  # the worker writes to the same standard error
            stack = " Its stack is printed above, the innermost call first."
    return StrategyError(
        f"Loader worker {number} (pid {worker.pid}) gave no batch in {iterator._timeout:g} s.",
        f"{_open_batch(iterator, number)}{stack}",
        "Look at what loading them waits for, or raise dataloader_timeout.",
    )


def _open_batch(iterator: Any, number: int) -> str:
    """Describe a worker's oldest outstanding batch; torch keeps only its number."""
    info = getattr(iterator, "_task_info", {})
    # For a batch that arrived out of order, the entry also holds the data.
    waiting = sorted(index for index, entry in info.items() if entry[0] == number and len(entry) == 1)
    if not waiting:
        return "It had no batch to load."
    samples = _sent(iterator, waiting[0])
    if not samples:
        return f"Its oldest open batch is number {waiting[0]} of this pass."
    return f"Its oldest open batch has the samples {listed(samples, most=_MOST_SAMPLES)}."


def open_samples(trace: TracebackType | None) -> tuple[Any, ...]:
    """Return the samples of the batch whose worker failed (none if unknown), the dataset and the collator."""
    iterator = _iterator_in(trace)
    if iterator is None:
        return [], None, None
    parts = (getattr(iterator, name, None) for name in ("_dataset", "_collate_fn"))
    return _sent(iterator, iterator._rcvd_idx - 1), *parts


def names_of_the_fetch(trace: TracebackType | None) -> dict[str, Any]:
    """Return what torch's fetcher held when reading or collating failed: its own frames, none of the user's."""
    # The outermost ones, which belong to the loader's dataset, come last.
    frames = [frame for frame, _ in walk_tb(trace) if frame.f_globals.get("__name__") in _FETCHERS]
    return {name: value for frame in reversed(frames) for name, value in frame.f_locals.items()}


def _sent(iterator: Any, number: int) -> list[Any]:
    """Return the samples of batch `number` of a loader's pass; none if they are no longer known."""
    sampler = getattr(iterator, "_index_sampler", None)
    seeded = [part for part in (sampler, *samplers_of(sampler)) if isinstance(part, SeededBatches)]
    back = iterator._send_idx - number
    return list(seeded[0].sent[-back]) if seeded and 0 < back <= len(seeded[0].sent) else []


def _pids(error: BaseException) -> set[int]:
    found = _PIDS.search(str(error))
    return {int(pid) for pid in found[1].replace(",", " ").split()} if found else set()


def _iterator_in(trace: TracebackType | None) -> Any:
    """Return the innermost loader iterator with workers in an error's traceback, torch's or torchdata's."""
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(trace) if "self" in frame.f_code.co_varnames]
    kinds = [each for each in owners if "MultiProcessingDataLoaderIter" in type(each).__name__]
    return next((each for each in reversed(kinds) if getattr(each, "_workers", ())), None)


def check_sendable(parts: Mapping[str, Any], *, num_workers: int, method: str | None = None) -> None:
    """Raise if a part cannot be sent to worker processes; the keys name the parts in the error.

    The contents of tensors are not read.
    """
    method = method or multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if num_workers == 0 or method == "fork":
        return
    for name, part in parts.items():
        try:
            _DryPickler(_Nowhere()).dump(part)
        except Exception as error:
            raise ConfigError(
                f"Cannot use dataloader_num_workers={num_workers} when processes are started by {method!r}.",
                f"{name} ({type(part).__name__}) cannot be sent to a worker: {error}.",
                "Define its functions and classes at the top level of a module, open files in the worker, at the "
                "first sample, or set dataloader_num_workers=0.",
            ) from error


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _DryPickler(ForkingPickler):
    """Pickle an object without its tensors, which are large and can always be sent."""

    def reducer_override(self, obj: Any) -> Any:
        is_array = isinstance(obj, numpy.ndarray) and obj.dtype != object
        return (int, ()) if is_array or isinstance(obj, (torch.Tensor, torch.UntypedStorage)) else NotImplemented
