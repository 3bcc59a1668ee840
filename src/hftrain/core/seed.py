"""Random number generators: seeding, capturing and restoring."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from hftrain.core.log import warn_once

# Generators that torch.manual_seed does not set: functions that capture and restore each.
_added: dict[str, tuple[Callable[[], int], Callable[[int], None]]] = {}


def add_generator(name: str, *, capture: Callable[[], int], restore: Callable[[int], None]) -> Callable[[], None]:
    """Seed, capture and restore another generator, whose state is one integer; return a function that undoes it."""
    _added[name] = capture, restore

    def forget() -> None:
        _added.pop(name, None)

    return forget


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (all devices).

    Args:
        seed: Any integer from 0 to 2**32 - 1.
        deterministic: Also make torch choose deterministic algorithms.
    """
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    for _, restore in _added.values():
        restore(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed all generators and use deterministic algorithms only; slow, for debugging.

    Mutates environment variables and torch's global flags. Source: the documented `full_determinism`.
    """
    set_seed(seed)
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    os.environ["ASCEND_LAUNCH_BLOCKING"] = "1"
    os.environ["HCCL_DETERMINISTIC"] = "1"
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def capture_rng() -> dict[str, Any]:
    """Return the state of every generator of this process, as tensors and plain containers only.

    Synchronises with an accelerator when there is one.
    """
    return plain_rng(rng_now(rng_devices()))


def rng_now(devices: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the state of every generator, fast; `plain_rng` makes of it what `restore_rng` takes.

    Args:
        devices: The accelerator, from `rng_devices`.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=False),
        "cpu": torch.default_generator.get_state(),
    }
    for name, module in devices:
        if not getattr(getattr(torch, name), "is_initialized", lambda: True)():
            continue  # reading the state would initialize it, which a forked process cannot
        state[name] = [module.get_rng_state(index) for index in _indices(name)] or module.get_rng_state()
    for name, (capture, _) in _added.items():
        state[name] = int(capture())
    return state


def plain_rng(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of `rng_now` as tensors and plain containers only."""
    found = state["numpy"]
    place, gauss = found["state"], (int(found["has_gauss"]), float(found["gauss"]))
    return {**state, "numpy": (found["bit_generator"], place["key"].tolist(), int(place["pos"]), *gauss)}


def restore_rng(state: dict[str, Any]) -> None:
    """Restore the state that `capture_rng` returned; the state of absent devices is ignored."""
    _check(state)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, numpy.asarray(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["cpu"])
    for name, module in rng_devices():
        if name in state and name == "mps":
            module.set_rng_state(state[name])
        elif name in state:
            per_device = state[name] if isinstance(state[name], (list, tuple)) else [state[name]]
            for index, device_state in zip(_indices(name), per_device, strict=False):
                module.set_rng_state(device_state, index)
    for name, (_, restore) in _added.items():
        if name in state:
            restore(state[name])


def _check(state: dict[str, Any]) -> None:
    """Raise ValueError for states that the generators do not check: NumPy reads at any position it is given."""
    _, _, gauss = state["python"]
    _, keys, position, has_gauss, cached = state["numpy"]
    is_fit = type(position) is int and 0 <= position <= 624 and len(keys) == 624 and has_gauss in (0, 1)
    if not is_fit or not all(isinstance(each, (float, type(None))) for each in (gauss, cached)):
        raise ValueError("The state of the random number generator is invalid.")


def rng_devices() -> list[tuple[str, Any]]:
    """Return kind and module of the accelerator, whose devices have a generator each."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return []
    module: Any = torch.get_device_module(device)
    with_generators = module if hasattr(module, "get_rng_state") else getattr(module, "random", None)
    if not hasattr(with_generators, "get_rng_state"):
        warn_once(
            f"torch.{device.type} has no get_rng_state(): a resumed run draws other random numbers on the device "
            "(dropout) than the uninterrupted one would have. Use a version of its package that has the function."
        )
        return []
    return [(device.type, with_generators)]


def _indices(name: str) -> range:
    """Return the devices of a kind; none for MPS, whose functions take no device."""
    return range(0 if name == "mps" else torch.accelerator.device_count())


def draw_as_a_loader() -> None:
    """Draw the number from torch's global generator that a DataLoader without its own generator draws at each pass.

    Dropout then draws the same numbers as in a plain loop over such a loader.
    """
    torch.empty((), dtype=torch.int64, device="cpu").random_()


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore every generator at the end."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)
