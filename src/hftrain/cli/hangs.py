"""`hftrain hangs`: where the processes of a run stand, and which of them stand apart."""

from __future__ import annotations

from pathlib import Path

from hftrain.cli.answer import Answer
from hftrain.core.errors import ConfigError
from hftrain.flight.reading import FOLDER, read_ledger
from hftrain.flight.stacks import read_stacks

_MOST_FRAMES = 8


def show_hangs(run: str) -> Answer:
    """Group the processes of a run by the stacks that they wrote last.

    Args:
        run: Its output folder; the run has a flight log.

    Raises:
        ConfigError: No process has written a stack.
    """
    stacks = read_stacks(Path(run) / FOLDER)
    if not stacks:
        raise ConfigError(
            f"Cannot say where the processes of {run} stand.",
            "None has written its stack.",
            "Train with flight_log=True and send them SIGQUIT (kill -QUIT), or with FlightLog(hang_timeout_s=600).",
        )
    ledger = read_ledger(run)
    lines = [f"The last step in the flight log is {max(ledger)}."] if ledger else []
    for number, stack in enumerate(stacks):
        ranks = ", ".join(map(str, stack.ranks))
        apart = ", apart from the others" if number and len(stacks[0].ranks) > len(stack.ranks) else ""
        lines += ["", f"rank{'s' * (len(stack.ranks) > 1)} {ranks}{apart}:"]
        lines += [f"    {function}  {Path(file).name}:{line}" for file, line, function in stack.frames[:_MOST_FRAMES]]
        lines += ["    ..."] * (len(stack.frames) > _MOST_FRAMES)
    return Answer(lines, [{"ranks": each.ranks, "frames": each.frames} for each in stacks])
