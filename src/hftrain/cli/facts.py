"""What a run has come to: its state, steps, best metric and time; and `hftrain runs`, which lists them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hftrain.checkpoint.manifest import JOURNAL, TRAINER_STATE, checkpoint_step
from hftrain.cli.answer import Answer, table
from hftrain.cli.runs import TOTAL, RunRecord, is_number, read_runs
from hftrain.core.errors import ConfigError
from hftrain.extras.progress.bars import seconds_text
from hftrain.storage.files import local_folder

UNENDED = "no end is recorded: it still runs, or was killed"
# A run without an end that has written nothing for so long is not taken for a running one.
_SILENT_S = 3600


def show_runs(folder: str) -> Answer:
    """Return a line for each run in a folder, or below it."""
    path = local_folder(folder, start=Path())
    folders = {file.parent for name in (JOURNAL, TRAINER_STATE) for file in path.rglob(name)}
    # A checkpoint holds a state too.
    folders = {folder.parent if checkpoint_step(folder.name) is not None else folder for folder in folders}
    if not folders:
        raise ConfigError(f"Cannot list the runs of {folder!r}.", "It holds none.", "Name a folder with output_dirs.")
    rows, data = [("run", "state", "step", "best", "time")], []
    for run in read_runs([str(each) for each in sorted(folders)]):
        best = best_of(run)
        rows.append((run.name, state_of(run), steps_of(run), str(best), duration_of(run)))
        row = dict(zip(rows[0], rows[-1], strict=True))
        data.append({**row, "best": best.value, "metric": best.metric, "folder": run.folder})
    return Answer(table(rows), {"runs": data})


def state_of(run: RunRecord) -> str:
    """Return whether a run is running, finished, stopped or failed, with the reason."""
    text, mood = status_of(run)
    if text == UNENDED:
        silent_s = time.time() - run.sessions[-1].end_s
        return "running" if silent_s < _SILENT_S else f"no end, silent for {seconds_text(silent_s)}"
    return text.replace("stopped", "failed", 1) if mood == "bad" else text.replace("complete", "finished", 1)


class Best(NamedTuple):
    """The metric for the best model, and its best step and value; None if it was not evaluated."""

    metric: str
    step: int | None
    value: float | None

    def __str__(self) -> str:
        return "" if self.value is None else f"{self.metric} {in_digits(self.value)} at step {self.step}"


def best_of(run: RunRecord) -> Best:
    """Return the best evaluation by `metric_for_best_model`, by default the loss."""
    arguments = run.arguments or {}
    metric = str(arguments.get("metric_for_best_model") or "loss")
    names = run.metrics
    name = metric if metric in names and metric != run.subject(metric) else f"eval_{metric}"
    if name not in names:
        name = next((candidate for candidate in names if candidate != run.subject(candidate) == metric), name)
    finite = [(value, step) for step, value in run.points(name) if math.isfinite(value)]
    if not finite or name == run.subject(name):
        return Best(metric, None, None)
    # The constructor of the arguments replaces None; a missing value means False.
    choose = max if arguments.get("greater_is_better") else min
    value, step = choose(finite, key=lambda pair: pair[0])
    return Best(name, int(step), value)


def status_of(run: RunRecord) -> tuple[str, str]:
    """Return how the last session ended, and whether that is ``"good"`` or ``"bad"``."""
    if not run.sessions:
        return "not known", ""
    ends = (event for event in reversed(run.events) if event["event"] in ("begin", "end"))
    last: Mapping[str, Any] = next(ends, {})
    if last.get("event") != "end":
        return UNENDED, ""
    reason = last.get("reason")
    return ("complete", "good") if not reason else (f"stopped: {reason}", "bad" if last.get("is_error") else "")


def last_begin(run: RunRecord) -> Mapping[str, Any]:
    """Return the journal's line of the last session; empty without a journal."""
    return next((event for event in reversed(run.events) if event["event"] == "begin"), {})


def steps_of(run: RunRecord) -> str:
    """Return how many optimizer steps were taken, of how many."""
    logged = max((int(entry["step"]) for _, entry in run.log if entry), default=0)
    num_done = run.sessions[-1].last_step if run.sessions else max(logged, run.state.get("global_step", 0))
    num_planned = last_begin(run).get("plan", {}).get("max_steps") or run.state.get("max_steps")
    return f"{num_done:,} of {num_planned:,}" if num_planned and is_number(num_planned) else f"{num_done:,}"


def duration_of(run: RunRecord) -> str:
    """Return the total duration of the sessions, without the time between them."""
    if run.sessions:
        return seconds_text(sum(session.end_s - session.start_s for session in run.sessions))
    total_s = next((entry[TOTAL] for _, entry in reversed(run.log) if TOTAL in entry), math.nan)
    return seconds_text(total_s) if math.isfinite(total_s) else ""


def in_digits(value: Any) -> str:
    """Return a number with about five digits; nothing for anything else."""
    if not is_number(value):
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
