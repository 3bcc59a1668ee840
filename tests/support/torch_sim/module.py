"""The module `torch.sim`: what torch and its users ask of an accelerator's module, and what tests ask of this one."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch

library: Any = None  # the compiled half

# ---- devices


def device_count() -> int:
    return library.device_count()


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return any(library.num_allocations(index) for index in range(device_count()))


def init() -> None:
    pass


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return library.is_forked()


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_device_name(device: Any = None) -> str:
    return "simulated accelerator"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (0, 0)


@dataclass
class DeviceProperties:
    name: str
    total_memory: int
    multi_processor_count: int = 1


def get_device_properties(device: Any = None) -> DeviceProperties:
    return DeviceProperties(get_device_name(device), library.memory_limit())


class device:
    """Make a device the current one: ``with torch.sim.device(1):``."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = torch._C._accelerator_exchangeDevice(self._index)

    def __exit__(self, *exc: object) -> None:
        torch._C._accelerator_maybeExchangeDevice(self._before)


class device_of(device):
    """Make the device of a tensor the current one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device.index if tensor.device.type == "sim" else None)


def _exchange_device(index: int) -> int:
    return torch._C._accelerator_exchangeDevice(index)


def _maybe_exchange_device(index: int) -> int:
    return torch._C._accelerator_maybeExchangeDevice(index)


def can_device_access_peer(device: Any, peer: Any) -> bool:
    return True


# ---- streams and events


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, device=torch.device("sim", _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, torch.device("sim", current_device()), enable_timing=True, blocking=blocking)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    at = torch.device("sim", _index(device))
    return torch.Stream(stream_id=0, device_index=at.index, device_type=current_stream(at).device_type)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    index = stream.device.index
    before, before_index = current_stream(index), current_device()
    set_device(index)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
        set_device(before_index)


StreamContext = stream


def is_current_stream_capturing() -> bool:
    return False


# ---- random numbers

default_generators: list[torch.Generator] = []


def _generator(device: Any = None) -> torch.Generator:
    if not default_generators:
        default_generators.extend(library.generator(index) for index in range(device_count()))
    return default_generators[_index("sim" if device is None else device)]


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Any = "sim") -> None:
    _generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: Any) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(int(seed))


def seed() -> int:
    return _generator().seed()


def seed_all() -> None:
    manual_seed_all(seed())


def initial_seed() -> int:
    return _generator().initial_seed()


# ---- precision


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


# ---- memory


def memory_stats(device: Any = None) -> dict[str, Any]:
    return dict(torch.accelerator.memory_stats(_index(device)))


def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Any = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: Any = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_accumulated_memory_stats(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    total = library.memory_limit()
    return max(total - memory_allocated(device), 0), total


memory = ModuleType("torch.sim.memory")
for _name in ("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "empty_cache"):
    setattr(memory, _name, globals()[_name])
random = ModuleType("torch.sim.random")
for _name in ("get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all", "manual_seed_all"):
    setattr(random, _name, globals()[_name])
amp = ModuleType("torch.sim.amp")


# ---- for tests: what is simulated, and what was seen


@dataclass(frozen=True)
class Noticed:
    """What the device noticed: its kind, the operator, and where the program was."""

    kind: str
    what: str
    stack: traceback.StackSummary = field(repr=False)

    def __str__(self) -> str:
        return f"{self.kind} ({self.what})\n{''.join(self.stack.format())}"


class Wait(Noticed):
    """One wait of the host for the device.

    `kind` is ``"item"``, ``"blocking copy"``, ``"pageable copy"`` (of memory that is not pinned), ``"data-dependent"``
    (the size of a result is in its values), ``"event"`` or ``"explicit"`` (a stream or a device was synchronized).
    """


class Race(Noticed):
    """One use of memory that may come too early or too late, as no stream has waited.

    `kind` is ``"read too early"``, ``"overwritten too early"``, ``"freed without record_stream"`` (the memory is used
    again before the other stream is done) or ``"pinned buffer"``. `stack` is that of the later use, and of the place
    where it was noticed for a pinned buffer.
    """


_records: dict[type[Noticed], list[list[Any]]] = {Wait: [], Race: []}


def _add(noticed: type[Noticed], kind: str, what: str) -> None:
    stack = traceback.StackSummary.extract(traceback.walk_stack(sys._getframe(1)), lookup_lines=False)
    stack.reverse()
    for record in _records[noticed]:
        record.append(noticed(kind, what, stack))


@contextmanager
def _recording(noticed: type[Noticed], set_listener: Any) -> Iterator[list[Any]]:
    record: list[Any] = []
    _records[noticed].append(record)
    set_listener(partial(_add, noticed))
    try:
        yield record
    finally:
        # Of lists that are equal, this one.
        _records[noticed] = [each for each in _records[noticed] if each is not record]
        if not _records[noticed]:
            set_listener(None)


def record_syncs() -> AbstractContextManager[list[Wait]]:
    """Give a list to which each wait of the host, in any thread, is added while the context lasts."""
    return _recording(Wait, library.set_wait_listener)


@contextmanager
def record_races() -> Iterator[list[Race]]:
    """Give a list to which each race, in any thread, is added while the context lasts."""
    with _recording(Race, library.set_race_listener) as record:
        yield record
        num_races()  # looks at the pinned buffers


def num_races() -> int:
    """How many races there were since the process started."""
    return library.num_races()


def forget_races() -> int:
    """Return `num_races`, and count from 0 again."""
    return library.forget_races()


def num_allocations(device: Any = None) -> int:
    """How often memory of the device was asked for since the process started."""
    return library.num_allocations(_index(device))


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Let each device have this much memory; more raises `torch.OutOfMemoryError`."""
    before = library.memory_limit()
    library.set_memory_limit(num_bytes)
    try:
        yield
    finally:
        library.set_memory_limit(before)


@contextmanager
def late_copies(is_late: bool) -> Iterator[None]:
    """Let non-blocking copies from and to pinned memory happen as late as may be (the default), or at once."""
    before = library.late_copies()
    library.set_late_copies(is_late)
    try:
        yield
    finally:
        library.set_late_copies(before)


@contextmanager
def strict_assignment() -> Iterator[None]:
    """Refuse ``parameter.data = tensor of the device``, as torch does for devices of other packages.

    `torch.nn.Module.to` then makes new parameters, which unties tied weights. Without it, the device is like CUDA.
    """
    library.set_assignment_shares(False)
    try:
        yield
    finally:
        library.set_assignment_shares(True)


def set_device_count(count: int) -> None:
    """Simulate another number of devices than two; before the first tensor is made."""
    library.set_device_count(count)


# ---- processes


def _collectives(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return library.collectives(torch.distributed.ProcessGroupGloo(store, rank, size, timeout))


def start() -> None:
    """What follows the registration of the device."""
    if count := os.environ.get("TORCH_SIM_DEVICES"):
        set_device_count(int(count))
    if torch.distributed.is_available():
        torch.distributed.Backend.register_backend("simccl", _collectives, devices=["sim"])
