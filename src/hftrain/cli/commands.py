"""The command line `hftrain`: which parts there are, which of them can run here, and what a training needs."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from hftrain.cli.estimate import estimate_script
from hftrain.core.errors import HFTrainError
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions
from hftrain.step.legality import check_legal
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import accepted_options, create_strategy, strategies

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of hftrain's commands, and print what it finds.

    ``hftrain strategies`` and ``hftrain precisions`` print a line for each name, and touch no device. ``hftrain
    estimate script.py ...`` runs a script up to its training, and prints what a step of that takes of memory.

    Args:
        argv: The words after ``hftrain``; None takes those of the process.
    """
    parser = argparse.ArgumentParser(prog="hftrain", description="Show what can be chosen by name, and what it needs.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, show in (("strategies", show_strategies), ("precisions", show_precisions)):
        part = commands.add_parser(command, help=f"list the {command} and whether each can run here")
        part.add_argument("--cpu", action="store_true", help="judge for the CPU, as with use_cpu=True")
        part.set_defaults(show=show)
    part = commands.add_parser("estimate", help="print the memory that a script's training step takes")
    part.add_argument("script", help="a Python file that trains")
    part.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    given = parser.parse_args(argv)
    if given.command == "estimate":
        print(estimate_script(given.script, given.arguments))
        return
    for line in given.show(use_cpu=given.cpu):
        print(line)


def show_strategies(*, use_cpu: bool = False) -> list[str]:
    """Return a line for each strategy: what it is, and the precisions it takes here or why it cannot run here."""
    taken = create_strategy("auto", **({"use_cpu": True} if use_cpu else {}))
    lines = [f"{'auto':<18} what the launcher and the machine say; the default\n{'':<18} here: {taken.name}"]
    for name in strategies.names():
        made = _make(functools.partial(_strategy, name, use_cpu=use_cpu))
        if isinstance(made, str):
            verdict = f"not here: {made}"
        else:
            reasons = {precision: _refusal(made, precision) for precision in precisions.names()}
            usable = [precision for precision, reason in reasons.items() if reason is None]
            verdict = f"{made.device_type}: {', '.join(usable)}" if usable else f"not here: {reasons['fp32']}"
        lines.append(f"{name:<18} {strategies.summary(name)}\n{'':<18} {verdict}")
    return lines


def show_precisions(*, use_cpu: bool = False) -> list[str]:
    """Return a line for each precision: what it is, and whether it runs with the strategy that would be taken here."""
    strategy = create_strategy("auto", **({"use_cpu": True} if use_cpu else {}))
    lines = []
    for name in precisions.names():
        reason = _refusal(strategy, name)
        verdict = f"with {strategy.name} on {strategy.device_type}" if reason is None else f"not here: {reason}"
        lines.append(f"{name:<18} {precisions.summary(name)}\n{'':<18} {verdict}")
    return lines


def _strategy(name: str, *, use_cpu: bool) -> Strategy:
    accepted = accepted_options(name)
    takes_it = accepted is None or "use_cpu" in accepted
    return create_strategy(name, **({"use_cpu": True} if use_cpu and takes_it else {}))


def _refusal(strategy: Strategy, precision: str) -> str | None:
    """Return why a strategy cannot run a precision here, None if it can."""

    def check() -> Precision:
        made = precisions.create(precision)
        check_legal(strategy, made)
        return made

    made = _make(check)
    return made if isinstance(made, str) else None


def _make(build: Callable[[], T]) -> T | str:
    """Build a part, or return the reason in its refusal."""
    try:
        return build()
    except (HFTrainError, ImportError) as error:
        return str(error).partition(" Received:")[0]
