"""The ceilings of the house: the most there may be of something, and how much is aimed at. They only go down.

`python tests/arch/house.py` measures and prints them all.
"""

from __future__ import annotations

from typing import NamedTuple


class Ceiling(NamedTuple):
    """The most there may be today, and at the end."""

    now: int
    goal: int


CEILINGS = {
    "source lines": Ceiling(56_120, 49_500),
    "source files": Ceiling(328, 372),
    "core lines": Ceiling(30_270, 30_000),
    "lines that a plain run loads": Ceiling(27_240, 28_000),
    "private reaches": Ceiling(37, 40),
    "names imported by trainer.py": Ceiling(85, 80),
    "files of a step": Ceiling(18, 18),
    "files of a save": Ceiling(41, 32),
    "files of a resume": Ceiling(89, 80),
    "files of an evaluation": Ceiling(42, 36),
    "test lines": Ceiling(72_400, 62_000),
}

# Not of the core: what a user chooses by name, or runs from the command line.
NOT_CORE = (
    *("extras/", "cli/", "loggers/", "optim/extras/"),
    *(f"strategies/{name}" for name in ("data_parallel.py", "deepspeed/", "fsdp/", "mesh/", "xla.py")),
)
