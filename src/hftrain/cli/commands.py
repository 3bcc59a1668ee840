"""The command line `hftrain`: which parts there are, which of them can run here, and what a training needs."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TypeVar

from hftrain.cli.checkpoints import show_checkpoints
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
    checkpoints RUN`` lists what a run has saved. ``hftrain estimate script.py ...`` runs a script up to its training,
    and prints how much memory a step takes. An error is one line on stderr, and the exit status is 1.

    Args:
        argv: The words after ``hftrain``; None takes those of the process.
    """
    parser = _make_parser()
    given = parser.parse_args(argv)
    if given.command is None:
        parser.print_help()
        return
    try:
        print("\n".join(given.show(given)))
    except HFTrainError as error:
        if given.debug:
            raise
        parser.exit(1, f"hftrain {given.command}: {error}\n")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hftrain", description="Look at what a run needs, can use and has saved.")
    parser.add_argument("--version", action="version", version=f"hftrain {version('hftrain')}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, show: Callable[[argparse.Namespace], list[str]], summary: str) -> argparse.ArgumentParser:
        part = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        part.set_defaults(show=show)
        return part

    for name, show in (("strategies", show_strategies), ("precisions", show_precisions)):
        part = add(name, lambda given, show=show: show(use_cpu=given.cpu), f"list the {name} and which can run here")  # type: ignore[misc]
        part.add_argument("--cpu", action="store_true", help="judge for the CPU, as with use_cpu=True")
    part = add(
        "checkpoints",
        lambda given: show_checkpoints(given.run, should_verify=given.verify),
        "list a run's checkpoints, whether they are whole, and which one a resume takes",
    )
    part.add_argument("run", help="the output_dir of the run")
    part.add_argument("--verify", action="store_true", help="read every file and compare its SHA-256")
    part = add(
        "estimate",
        lambda given: [str(estimate_script(given.script, given.arguments))],
        "print how much memory a script's training step takes",
    )
    part.add_argument("script", help="a Python file that trains")
    part.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


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
