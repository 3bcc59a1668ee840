"""What this machine and the launcher offer, read without touching a device."""

from __future__ import annotations

import os

import torch

from hftrain.core.launcher import read_launch


def is_set(variable: str) -> bool:
    """Tell whether an environment variable of a launcher says yes."""
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")


def lacks_processes() -> bool:
    """Tell whether `accelerate launch` was asked for several processes and started this one alone, as it does on CPUs.

    It then says where they should meet, and neither it nor MPI says how many they are.
    """
    names = ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and read_launch().launcher is None


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
