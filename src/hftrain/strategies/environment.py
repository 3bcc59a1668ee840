"""What this machine and the launcher offer, read without touching a device."""

from __future__ import annotations

import os

import torch

from hftrain.core.errors import ConfigError

_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
_WORLD_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def launched_rank() -> int:
    """Return this process's rank as the launcher set it, 0 without one."""
    return _read(_RANK, 0)


def launched_local_rank(default: int = 0) -> int:
    """Return this process's rank on its machine as the launcher set it, `default` without one."""
    return _read(_LOCAL_RANK, default)


def launched_world_size() -> int:
    """Return the number of processes the launcher started, 1 without one."""
    return _read(_WORLD_SIZE, 1)


def is_set(variable: str) -> bool:
    """Tell whether an environment variable of a launcher says yes."""
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")


def lacks_processes() -> bool:
    """Tell whether `accelerate launch` was asked for several processes and started this one alone, as it does on CPUs.

    It then says where they should meet, and neither it nor MPI says how many they are.
    """
    names = ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and _read(_WORLD_SIZE, 0) == 0


def find_device_type(*, use_cpu: bool = False) -> str:
    """Return the kind of device to run on: the accelerator torch finds, unless the CPU is asked for."""
    if use_cpu:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    other = torch.accelerator.current_accelerator(check_available=True)  # XPU, and devices that other packages add
    return "cpu" if other is None else other.type


def _read(names: tuple[str, ...], default: int) -> int:
    """Return the first variable that is set; some launchers set -1 to say that they are none."""
    for name in names:
        value = os.environ.get(name, "-1").strip()
        if not value.removeprefix("-").isdecimal():
            raise ConfigError(
                f"The environment variable {name} is set.",
                "It must hold a whole number.",
                "Start with torchrun or `accelerate launch`, or unset it.",
                **{name: value},
            )
        if int(value) >= 0:
            return int(value)
    return default
