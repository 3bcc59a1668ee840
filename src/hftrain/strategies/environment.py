"""Read the environment that `accelerate launch` sets."""

from __future__ import annotations

import os

from hftrain.core.launcher import read_launch

# Only `accelerate launch` sets them, the second one with DeepSpeed.
_MARKS = ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "ACCELERATE_CONFIG_DS_FIELDS")


def launched(variable: str) -> str:
    """Return a launcher's variable; nothing without one, where transformers' `TrainingArguments` may have set it."""
    is_alone = os.environ.keys().isdisjoint(_MARKS) and read_launch().launcher is None
    return "" if is_alone else os.environ.get(variable, "")


def is_set(variable: str) -> bool:
    """Return whether a launcher's environment variable is true."""
    return launched(variable).lower() in ("1", "true", "yes")


def lacks_processes() -> bool:
    """Return whether `accelerate launch` started only this process of several, as it does on CPUs.

    It then sets the rendezvous address, but neither it nor MPI sets the number of processes.
    """
    names = (_MARKS[0], "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and read_launch().launcher is None
