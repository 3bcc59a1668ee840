"""`hftrain bisect`: the first step, and the first module in it, in which two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hftrain.cli.answer import Answer
from hftrain.cli.replay import do_step_apart, ledger_with, new_folder, read_ranks
from hftrain.cli.runs import read_run
from hftrain.core.errors import ConfigError
from hftrain.extras.flight.observing import first_difference
from hftrain.extras.flight.reading import first_parting, read_ledger, read_sessions, shortened

# What rounds all numbers differently.
_ROUNDING_SETTINGS = ("argument bf16", "argument fp16", "argument tf32", "precision", "strategy", "world_size")


def show_bisect(runs: Sequence[str], *, output: str | None = None, steps: int | None = None) -> Answer:
    """Find where two runs part: the first step, and by doing it again in both, the first module.

    Args:
        runs: The output folders of two runs with flight logs.
        output: A new folder for what was observed; None: ``bisect``.
        steps: How many steps to compare; None: all.
    """
    ledgers, settings = [ledger_with(run) for run in runs], _setting_differences(runs)
    described = [f"{name}: {shortened(first)} and {shortened(second)}" for name, (first, second) in settings.items()]
    if causes := [name for name in _ROUNDING_SETTINGS if name in settings]:
        reason = f"Their numbers are rounded differently, because these differ: {', '.join(causes)}."
        raise ConfigError(f"Cannot compare {runs[0]} and {runs[1]}.", reason, "Use hftrain prove on their script.")
    if steps is not None:
        ledgers = [{step: ledger[step] for step in ledger if step <= steps} for ledger in ledgers]
    last = min(max(ledger, default=0) for ledger in ledgers)
    lines, module, folder = list[str](), None, new_folder(output or "bisect", what="observe")
    step, names, values = first_parting(*ledgers)
    if step is None:
        lines.append(f"The runs are the same to the bit up to step {last}.")
        return Answer([*lines, *described], {"step": None, "around": described})
    lines.append(f"step {step}: {values}")
    if names[0] not in ("samples", "rate"):  # else the modules had other input, or were the same
        folders = [do_step_apart(run, step, folder / name) for run, name in zip(runs, "ab", strict=True)]
        for run, ledger, replayed in zip(runs, ledgers, folders, strict=True):
            own_step, _, own_values = first_parting(ledger, read_ledger(replayed))
            if own_step is not None:
                lines.append(f"Done again, {run} is not the same: step {own_step}: {own_values}")
        module = first_difference(*(read_ranks(replayed, "modules") for replayed in folders))
        lines.append(f"step {step}, {module}" if module else "All modules of that step are the same to the bit.")
    return Answer([*lines, *described], {"step": step, "differs": names, "where": module, "around": described})


def _setting_differences(runs: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    pairs: dict[str, tuple[Any, Any]] = {}
    first, second = ({**read_sessions(run)[-1], **vars(read_run(run, name=run))} for run in runs)
    for group in ("arguments", "versions", "data", "environment"):
        values, other_values = first.get(group), second.get(group)
        if values is not None and other_values is not None:
            for name in sorted({*values, *other_values} - {"output_dir", "logging_dir", "run_name"}):
                pairs[f"{group.removesuffix('s')} {name}"] = values.get(name), other_values.get(name)
    for name in ("precision", "strategy", "world_size"):
        pairs[name] = first.get(name, second.get(name)), second.get(name, first.get(name))
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
