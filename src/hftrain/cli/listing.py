"""`hftrain strategies` and `hftrain precisions`: list what can run on this machine, and why others cannot."""

from __future__ import annotations

import functools
import shutil
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from hftrain.cli.answer import Answer
from hftrain.core.errors import HFTrainError
from hftrain.core.registry import Registry
from hftrain.precision.registry import precisions
from hftrain.step.legality import check_legal
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import accepted_options, create_strategy, strategies

T = TypeVar("T")


def show_strategies(*, use_cpu: bool = False) -> Answer:
    """Return lines that group the strategies by the precisions they support here, or the reason they cannot run."""
    auto = _strategy("auto", use_cpu=use_cpu)
    verdicts = [(name, *_verdict_of(name, use_cpu)) for name in strategies.names()]
    lines = [f'strategy="auto", the default, is "{auto.name}" here.', *_group_by_verdict(strategies, verdicts)]
    return Answer(lines, {"auto": auto.name, "strategies": _facts(verdicts)})


def show_precisions(*, use_cpu: bool = False) -> Answer:
    """Return lines that group the precisions by whether the default strategy supports them here, or why not."""
    auto = _strategy("auto", use_cpu=use_cpu)
    available = f'Available with strategy="{auto.name}" on {auto.device_type}:'
    refusals = [(name, _refusal_reason(auto, name)) for name in precisions.names()]
    verdicts = [(name, reason is None, reason or available) for name, reason in refusals]
    return Answer(_group_by_verdict(precisions, verdicts)[1:], {"strategy": auto.name, "precisions": _facts(verdicts)})


def _facts(verdicts: Iterable[tuple[str, bool, str]]) -> dict[str, dict[str, Any]]:
    return {name: {"is_available": can_run, "verdict": verdict} for name, can_run, verdict in verdicts}


def _group_by_verdict(registry: Registry[Any], verdicts: Iterable[tuple[str, bool, str]]) -> list[str]:
    """Return each verdict once, usable ones first, followed by the names that share it and their summaries."""
    groups: dict[tuple[bool, str], list[str]] = {}
    for name, can_run, verdict in verdicts:
        groups.setdefault((not can_run, verdict), []).append(name)
    width = shutil.get_terminal_size().columns
    column = max(len(name) for names in groups.values() for name in names) + 4
    lines: list[str] = []
    for (is_missing, verdict), names in sorted(groups.items(), key=lambda group: group[0][0]):
        if is_missing and "Not available here:" not in lines:
            lines += ["", "Not available here:"]
        listed = []
        for name in names:
            listed += _wrap(f"  {name:<{column - 2}}{registry.summary(name)}", width, " " * column)
        lines += (
            ["", *listed, *_wrap(f"    {verdict}", width, "    ")]
            if is_missing
            else ["", *_wrap(verdict, width, ""), *listed]
        )
    return lines


def _wrap(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _verdict_of(name: str, use_cpu: bool) -> tuple[bool, str]:
    """Return whether a strategy can run here, and the precisions it supports or the reason."""
    strategy = _try_build(functools.partial(_strategy, name, use_cpu=use_cpu))
    if isinstance(strategy, str):
        return False, strategy
    reasons = {precision: _refusal_reason(strategy, precision) for precision in precisions.names()}
    usable = [precision for precision, reason in reasons.items() if reason is None]
    if not usable:
        return False, str(reasons["fp32"])
    return True, f"Available on {strategy.device_type} with {', '.join(usable)}:"


def _strategy(name: str, *, use_cpu: bool) -> Strategy:
    accepted = None if name == "auto" else accepted_options(name)
    takes_it = accepted is None or "use_cpu" in accepted
    return create_strategy(name, **({"use_cpu": True} if use_cpu and takes_it else {}))


def _refusal_reason(strategy: Strategy, precision: str) -> str | None:
    """Return why a strategy cannot run a precision here, None if it can."""
    return _try_build(lambda: check_legal(strategy, precisions.create(precision)))


def _try_build(build: Callable[[], T]) -> T | str:
    """Build a part, or return the reason from the error."""
    try:
        return build()
    except (HFTrainError, ImportError) as error:
        return str(error).partition(" Received:")[0]
