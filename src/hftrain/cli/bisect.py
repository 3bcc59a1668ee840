"""`hftrain bisect`: the first step, and the first module in it, in which two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hftrain.cli.answer import Answer
from hftrain.cli.replay import do_step_apart, ledger_with, new_folder, read_ranks, session_of
from hftrain.cli.rounding import first_apart, first_module_apart
from hftrain.cli.runs import read_run
from hftrain.extras.flight.observing import first_difference
from hftrain.extras.flight.reading import first_parting, read_ledger, read_sessions, shortened

# What rounds all numbers differently, and a unit in the last place of 1 in types coarser than float32.
_ROUNDING_SETTINGS = ("argument bf16", "argument fp16", "argument tf32", "precision", "strategy", "world_size")
_UNITS = {"bf16": 2.0**-7, "fp16": 2.0**-10, "tf32": 2.0**-10}


def show_bisect(runs: Sequence[str], *, output: str | None = None, steps: int | None = None) -> Answer:
    """Find where two runs part: the first step, and by doing it again in both, the first module.

    Runs of other precisions, strategies or numbers of processes part where they are farther apart than ten times what
    a change of all weights of the first run by one unit in the last place makes; it is done again for that.

    Args:
        runs: The output folders of two runs with flight logs.
        output: A new folder for what was observed; None: ``bisect``.
        steps: How many steps to compare; None: all, or 200 if the runs round differently.
    """
    ledgers, settings = [ledger_with(run) for run in runs], _setting_differences(runs)
    described = [f"{name}: {shortened(first)} and {shortened(second)}" for name, (first, second) in settings.items()]
    causes = [name for name in _ROUNDING_SETTINGS if name in settings]
    max_step = 200 if causes and steps is None else steps
    if max_step is not None:
        ledgers = [{step: ledger[step] for step in ledger if step <= max_step} for ledger in ledgers]
    last = min(max(ledger, default=0) for ledger in ledgers)
    lines, module, how, folder = list[str](), None, "to the bit", new_folder(output or "bisect", what="observe")
    if causes:
        how = "up to rounding"
        lines = [f"Compared up to rounding, and to step {last}, because these differ: {', '.join(causes)}"]
        types = f"{causes} {[session_of(run, last).get('precision') for run in runs]}"
        unit = max((unit for kind, unit in _UNITS.items() if kind in types), default=0.0)
        perturbed = do_step_apart(runs[0], last, folder / "perturbed", unit=unit)
        step, names, values = first_apart(ledgers[0], ledgers[1], read_ledger(perturbed))
    else:
        step, names, values = first_parting(*ledgers)
    if step is None:
        lines.append(f"The runs are the same {how} up to step {last}.")
        return Answer([*lines, *described], {"step": None, "around": described})
    lines.append(f"step {step}: {values}")
    if names[0] not in ("samples", "rate"):  # else the modules had other input, or were the same
        folders = [do_step_apart(run, step, folder / name) for run, name in zip(runs, "ab", strict=True)]
        for run, ledger, replayed in zip(runs, ledgers, folders, strict=True):
            own_step, _, own_values = first_parting(ledger, read_ledger(replayed))
            if own_step is not None:
                lines.append(f"Done again, {run} is not the same: step {own_step}: {own_values}")
        folders += [do_step_apart(runs[0], step, folder / "perturbed-step", unit=unit)] if causes else []
        modules = [read_ranks(replayed, "modules") for replayed in folders]
        if causes:
            has_backward = "world_size" not in causes and "fp16" not in types
            module = first_module_apart(modules, has_backward=has_backward)
            how += "" if has_backward else ", whose gradients are not compared"
        else:
            module = first_difference(*modules)
        lines.append(f"step {step}, {module}" if module else f"All modules of that step are the same {how}.")
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
