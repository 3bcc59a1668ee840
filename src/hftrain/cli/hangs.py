"""`hftrain hangs`: where the processes of a run stand, which of them stand apart, and which one the others wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hftrain.cli.answer import Answer
from hftrain.core.errors import ConfigError
from hftrain.extras.flight.reading import flight_folder, read_ledger, read_sessions
from hftrain.extras.flight.split import PHASES, read_split
from hftrain.extras.flight.stacks import Stack, read_phases, read_stacks

_MAX_FRAMES = 8


def show_hangs(run: str) -> Answer:
    """Group the processes of a run by the places where they stood when they wrote last, and compare their times.

    Raises:
        ConfigError: No process has written a stack or a step.
    """
    folder = flight_folder(run)
    session = [{}, *read_sessions(run)][-1]
    stacks, split, phases = read_stacks(folder, since=session.get("at", 0.0)), read_split(run), read_phases(folder)
    if not stacks and split is None:
        raise ConfigError(
            f"Cannot say where the processes of {run} stand.",
            "None has written its stack since the last session began, or a step.",
            "Train with flight_log=True and send them SIGQUIT (kill -QUIT), or with FlightLog(hang_timeout_s=600).",
        )
    ledger = read_ledger(run)
    lines = [f"The last step in the flight log is {max(ledger)}."] if ledger else []
    for stack in stacks:
        # Of two equally large groups, the one that waits in a collective waits for the other one.
        is_less = len(stack.ranks) < len(stacks[0].ranks) or (stacks[0].collective and stack.collective == "")
        lines += ["", *_describe_stack(stack, ", apart from the others" if is_less else "")]
    missing = set(range(session.get("world_size", 0) if stacks else 0)).difference(*(stack.ranks for stack in stacks))
    silent = {rank: phases.get(rank, "unknown") for rank in sorted(missing)}
    lines += [f"rank {rank} has written no stack. Its last phase: {phase}." for rank, phase in silent.items()]
    lines += [] if split is None else ["", *_time_table(split)]
    return Answer(lines, {"stacks": [asdict(stack) for stack in stacks], "silent": silent, "split": split})


def _describe_stack(stack: Stack, suffix: str) -> Iterator[str]:
    yield f"rank{'s' * (len(stack.ranks) > 1)} {', '.join(map(str, stack.ranks))}{suffix}:"
    collective = "unknown" if stack.collective is None else stack.collective or "none"
    yield f"    {stack.phase}; collective: {collective}"
    for file, line, function in stack.frames[:_MAX_FRAMES]:
        yield f"    {function}  {Path(file).name}:{line}"
    if len(stack.frames) > _MAX_FRAMES:
        yield "    ..."


def _time_table(split: Mapping[str, Any]) -> Iterator[str]:
    yield f"Mean milliseconds on the host, of the last {split['steps']} steps:"
    yield "rank" + "".join(map("{:>11}".format, PHASES))
    for rank, ms in enumerate(split["ms"]):
        yield f"{rank:>4}" + "".join(f"{ms[name]:>11.1f}" for name in PHASES)
    if waited := split["waited"]:
        waiting = f"rank {waited['rank']} was waited for in {waited['steps']} of {split['steps']} steps"
        phase = "between the steps" if waited["phase"] == "between" else f"in {waited['phase']}"
        yield f"{waiting}, {phase}: {waited['ms']:.0f} ms, the others {waited['others']:.0f} ms."
