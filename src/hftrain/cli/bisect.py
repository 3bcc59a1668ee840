"""`hftrain bisect`: the first step, and the first module in it, in which two runs differ."""

from __future__ import annotations

from collections.abc import Sequence

from hftrain.cli.answer import Answer
from hftrain.cli.replay import do_step_apart, ledger_with, new_folder, read_ranks
from hftrain.cli.runs import read_runs
from hftrain.core.errors import ConfigError
from hftrain.flight.observing import first_difference
from hftrain.flight.reading import first_parting, shortened


def show_bisect(runs: Sequence[str], *, output: str | None = None) -> Answer:
    """Find where two runs part: the first step, and by doing it again in both, the first module.

    Args:
        runs: The output folders of two runs with flight logs.
        output: A new folder for what was observed; None: ``bisect``.

    Raises:
        ConfigError: There are not two runs, or one has no flight log or cannot be done again.
    """
    if len(runs) != 2:
        raise ConfigError(f"Cannot compare {len(runs)} runs.", "Two can part.", "Name two output folders.")
    ledgers = [ledger_with(run) for run in runs]
    step, names, values = first_parting(*ledgers)
    around = _differences_around(runs)
    if step is None:
        last = min(max(ledger) for ledger in ledgers)
        return Answer(
            [f"The runs are the same to the bit up to step {last}.", *around], {"step": None, "around": around}
        )
    lines, where = [f"step {step}: {values}"], None
    if names[0] not in ("samples", "rate"):  # else the modules had other input, or were the same
        folder = new_folder(output or "bisect", what="observe")
        for run, name in zip(runs, "ab", strict=True):
            do_step_apart(run, step, folder / name, has_samples=False)
        where = first_difference(*(read_ranks(folder / name, "modules") for name in "ab"))
        lines.append(f"step {step}, {where}" if where else "No module of that step differs: the updates do.")
    return Answer([*lines, *around], {"step": step, "differs": names, "where": where, "around": around})


def _differences_around(runs: Sequence[str]) -> list[str]:
    """Return which arguments and versions of two runs differ."""
    mine, other = read_runs(runs)
    lines = []
    for what in ("arguments", "versions"):
        one, two = (dict(getattr(each, what) or {}) for each in (mine, other))
        for name in sorted(one.keys() | two.keys()):
            if one.get(name) != two.get(name) and name not in ("output_dir", "logging_dir", "run_name"):
                lines.append(f"{what[:-1]} {name}: {shortened(one.get(name))} and {shortened(two.get(name))}")
    return lines
