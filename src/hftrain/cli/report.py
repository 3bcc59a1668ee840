"""`hftrain report`: one HTML file about runs that needs no server and no network."""

from __future__ import annotations

import base64
import gzip
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from hftrain.cli.answer import Answer
from hftrain.cli.blame import tables_of
from hftrain.cli.facts import UNENDED, best_of, duration_of, in_digits, last_begin, status_of, steps_of
from hftrain.cli.runs import FEW_RUNS, MEMORY, THROUGHPUT, RunRecord, read_runs, thinned, unlogged
from hftrain.core.errors import ConfigError
from hftrain.core.extras import require
from hftrain.storage.files import readable_bytes

_MAX_POINTS = 2000
_MAX_EVALUATIONS = 300
_MAX_NAMED = 8
_RATE, _NORM = "learning_rate", "grad_norm"
_TITLES = {
    _RATE: "Learning rate",
    _NORM: "Gradient norm",
    THROUGHPUT: "Throughput (samples per second, without evaluations and saves)",
    MEMORY["host"]: "Memory of the main process, highest so far (GB)",
    MEMORY["device"]: "Memory of its device, highest so far (GB)",
}
# Settings of a run's location, which are not compared.
_NAMES = ("output_dir", "run_name", "logging_dir")
_NO_JOURNAL = "The folder has no journal.jsonl, so throughput, memory, stops and resumes are not known."
_NO_ARGUMENTS = (
    "Not known: the folder has no file with arguments, or only training_args.bin, a pickle that is not read."
)


def show_report(runs: Sequence[str], *, output: str = "report.html") -> Answer:
    """Write a page with the curves, evaluations, arguments, checkpoints and stops of runs.

    Args:
        output: The HTML file to write; an existing one is replaced.

    Raises:
        ConfigError: A folder contains no run, or the file cannot be written.
        MissingDependencyError: The packages of the extra ``report`` are not installed.
    """
    records = read_runs(runs)
    for requirement in ("plotly>=6", "jinja2>=3"):
        require(requirement, feature="hftrain report", extra="report")
    text = render(records)
    try:
        Path(output).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"Cannot write {output!r}.", f"{error}.", "Give another file with -o.") from error
    line = f"Wrote {output} ({readable_bytes(Path(output).stat().st_size)})"
    return Answer([line], {"output": output, "runs": [run.folder for run in records]})


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page; all text from runs is escaped."""
    from jinja2 import Environment
    from plotly.offline import get_plotlyjs

    runs = _best_first(runs)
    panels = _panels(runs)
    template = Environment(autoescape=True).from_string(files("hftrain.cli").joinpath("report.html").read_text("utf-8"))
    return template.render(
        title=" and ".join(run.name for run in runs) if len(runs) <= FEW_RUNS else _common_name(runs),
        version=version("hftrain"),
        written=_when(time.time()),
        runs=[_describe_run(run) for run in runs],
        panels=panels,
        data=[{**panel, "is_compared": len(runs) > 1} for panel in panels],
        shares_legend=len(runs) > FEW_RUNS,
        notes=[f"{run.name}: {note}" for run in runs for note in _notes(run)],
        summary=_summary(runs),
        differing=_differing(runs),
        library=base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode(),
    )


def _best_first(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs by their best evaluation, if that is of one metric; those without one last."""
    best = {run.folder: best_of(run) for run in runs}
    evaluated = [run for run in runs if best[run.folder].value is not None]
    if len({best[run.folder].metric for run in evaluated}) != 1:
        return list(runs)
    sign = -1 if (evaluated[0].arguments or {}).get("greater_is_better") else 1
    ordered = sorted(evaluated, key=lambda run: sign * (best[run.folder].value or 0.0))
    return ordered + [run for run in runs if run not in evaluated]


def _common_name(runs: Sequence[RunRecord]) -> str:
    parents = {Path(run.folder).parent.name for run in runs}
    return f"{parents.pop()}: {len(runs)} runs" if len(parents) == 1 else f"{len(runs)} runs"


# -- curves ----------------------------------------------------------------------------------------------------------


def _panels(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return a panel for each subject: losses first, measures of the training itself last."""
    panels: dict[str, dict[str, Any]] = {}
    marks = [mark for number, run in enumerate(runs) for mark in _marks(run, number if len(runs) > 1 else -1)]
    for number, run in enumerate(runs):
        for metric in run.metrics:
            subject = run.subject(metric)
            panel = panels.setdefault(subject, {"curves": [], "marks": marks, "notes": []})
            panel["title"] = _TITLES.get(subject, subject)
            panel["is_from_zero"] = subject in (THROUGHPUT, *MEMORY.values())
            label = metric if len(runs) == 1 else run.name if metric == subject else f"{run.name}: {metric}"
            color = len(panel["curves"]) if len(runs) == 1 else number
            panel["curves"].append(_curve(run, metric, label=label, color=color))
            infinite = [step for step, value in run.points(metric) if not math.isfinite(value)]
            if infinite:
                steps = ", ".join(map(in_digits, infinite[:_MAX_NAMED]))
                steps += ", ..." if len(infinite) > _MAX_NAMED else ""
                panel["notes"].append(f"{label}: NaN or infinite at step {steps}")
    last_subjects = [*_TITLES]
    evaluated = {run.subject(name) for run in runs for name in run.metrics if name != run.subject(name)}

    def order(subject: str) -> tuple[int, int]:
        if subject in last_subjects:
            return 3, last_subjects.index(subject)
        return 0 if subject == "loss" else 1 if subject in evaluated else 2, 0

    return [panels[subject] for subject in sorted(panels, key=order)]


def _curve(run: RunRecord, metric: str, *, label: str, color: int) -> dict[str, Any]:
    start = run.sessions[0].start_s if run.sessions else 0.0
    rows = run.rows(metric)
    points = [
        (step, value, None if math.isnan(epoch) else epoch, None if math.isnan(at) else round((at - start) / 3600, 5))
        for step, value, epoch, at in map(rows.__getitem__, thinned([row[1] for row in rows], _MAX_POINTS))
    ]
    columns = zip(*points, strict=True)
    columns_by_name = dict(zip(("step", "value", "epoch", "hours"), map(list, columns), strict=True))
    return {**columns_by_name, "label": label, "color": color, "is_evaluation": metric != run.subject(metric)}


def _marks(run: RunRecord, color: int) -> list[dict[str, Any]]:
    marks: dict[int, str] = {}
    for event in run.events:
        step = event.get("step", 0)
        if event["event"] == "begin" and step:
            marks[step] = "stopped, resumed" if step in marks else "resumed"
        elif event["event"] == "end" and event.get("reason"):
            marks[step] = "stopped"
    return [{"step": step, "text": text, "color": color % 8} for step, text in marks.items()]


# -- tables ----------------------------------------------------------------------------------------------------------


def _describe_run(run: RunRecord) -> dict[str, Any]:
    return {
        "name": run.name,
        "facts": _facts(run),
        "evaluations": _evaluations(run),
        "times": _rows(_timeline(run)),
        "no_journal": _NO_JOURNAL,
        "arguments": _rows((name, _value(value)) for name, value in sorted((run.arguments or {}).items())),
        "no_arguments": _NO_ARGUMENTS if run.arguments is None else "None.",
        "environment": _rows(_environment(run)),
        "checkpoints": _rows(_checkpoint_rows(run)),
        "flight": tables_of(run.folder),
    }


def _facts(run: RunRecord) -> list[dict[str, str]]:
    status, mood = status_of(run)
    best = best_of(run)
    final = next((value for _, value in reversed(run.points("loss"))), None)
    begin = last_begin(run)
    limits = begin.get("plan", {}).get("limits")
    facts = [
        ("Status", status, mood),
        ("Steps", steps_of(run), ""),
        ("Not all data", _value(limits) if limits else "", "bad"),
        ("Time", duration_of(run), ""),
        ("Last loss", "" if final is None else in_digits(final), ""),
        (f"Best {best.metric}", str(best).removeprefix(f"{best.metric} "), "good"),
        ("Median samples per second", _median_throughput(run), ""),
        ("Model", str(begin.get("model") or ""), ""),
    ]
    return [{"name": name, "text": text, "mood": mood} for name, text, mood in facts if text]


def _summary(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return a row for each run, with the best one marked if they were sorted by one metric."""
    rows, metrics = [], set()
    for run in runs:
        best = best_of(run)
        if best.value is not None:
            metrics.add(best.metric)
        rows.append((run.name, status_of(run)[0], steps_of(run), duration_of(run), str(best), _median_throughput(run)))
    table = _rows(rows)
    table[0]["is_best"] = len(metrics) == 1
    return {"head": ["Run", "Status", "Steps", "Time", "Best", "Median samples per second"], "rows": table}


def _differing(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the arguments that differ between runs, by run if there are more runs than arguments."""
    arguments_known = [{**run.arguments, **run.origin} for run in runs if run.arguments is not None]
    rows = []
    for name in sorted({name for arguments in arguments_known for name in arguments if name not in _NAMES}):
        values = [_value(arguments[name]) if name in arguments else "default" for arguments in arguments_known]
        if len(set(values)) > 1:
            texts = iter(values)
            rows.append((name, *("not known" if run.arguments is None else next(texts) for run in runs)))
    unknown = [run.name for run in runs if run.arguments is None]
    note = f"Not known of {', '.join(unknown)}." if unknown else "" if rows else "None."
    names = [run.name for run in runs]
    if not rows or len(rows) >= len(runs):
        return {"head": ["Argument", *names], "rows": _rows(rows), "note": note}
    by_run = list(zip(("Run", *names), *rows, strict=True))
    return {"head": by_run[0], "rows": _rows(by_run[1:]), "note": note}


def _evaluations(run: RunRecord) -> dict[str, Any]:
    names = [name for name in run.metrics if name != run.subject(name)]
    rows: dict[float, dict[str, Any]] = {}
    for name in names:
        for step, value, epoch, _ in run.rows(name):
            rows.setdefault(step, {"epoch": None if math.isnan(epoch) else epoch})[name] = value
    best = best_of(run)
    steps = sorted(rows)
    last_steps = set(steps[-_MAX_EVALUATIONS:])
    shown_steps = [step for step in steps if step == best.step or step in last_steps]
    note = "" if best.value is None else f"The best {best.metric} is that of step {best.step}."
    if len(shown_steps) < len(steps):
        note += f" The last {_MAX_EVALUATIONS} of {len(steps)} are shown, and the best."
    values = ([step, *(rows[step].get(name) for name in ("epoch", *names))] for step in shown_steps)
    table_rows = [{"cells": [*map(in_digits, cells)], "is_best": cells[0] == best.step} for cells in values]
    return {"head": ["step", "epoch", *names], "rows": table_rows, "note": note}


def _timeline(run: RunRecord) -> Iterable[tuple[str, str, str]]:
    """Yield the time, step and description of each event except logs and saves."""
    previous: Mapping[str, Any] | None = None
    for number, event in enumerate(run.events):
        when, step = _when(event["at"]), str(event.get("step", ""))
        if event["event"] == "begin":
            start = event.get("resumed_from")
            environment = event.get("environment", {})
            text = f"resumed from {start}" if start else "began"
            text += f"; processes: {environment.get('processes', 1)}, machines: {environment.get('hosts', 1)}"
            arguments = event.get("arguments", {})
            previous = arguments if previous is None or not start else previous
            text += "".join(f"; {change}" for change in _changes(previous, arguments))
            previous = arguments
            yield when, step, text
            session = next((session for session in run.sessions if session.start_s == event["at"]), None)
            later = [next_event["event"] for next_event in run.events[number + 1 :]]
            following = later[: later.index("begin")] if "begin" in later else later
            if session and "end" not in following:
                description = "killed, this is the last entry" if "begin" in later else f"last entry; {UNENDED}"
                yield _when(session.end_s), str(session.last_step), description
        elif event["event"] == "end":
            reason = event.get("reason")
            yield when, step, "did all steps" if not reason else f"stopped: {reason}"


def _changes(previous: Mapping[str, Any], current: Mapping[str, Any]) -> Iterable[str]:
    """Yield the arguments that a resume has changed."""
    for name in sorted({*previous, *current} - {*_NAMES}):
        old, new = (_value(values[name]) if name in values else "the default" for values in (previous, current))
        if old != new:
            yield f"{name}: {new}, before: {old}"


def _notes(run: RunRecord) -> Iterable[str]:
    if not run.sessions:
        yield _NO_JOURNAL
    if not run.metrics:
        yield unlogged(run)
    if run.num_earlier:
        yield f"Another run began in this folder before ({run.num_earlier} in all). Only the last one is shown."
    if run.num_unread:
        yield f"Lines of journal.jsonl that are incomplete or damaged, and left out: {run.num_unread}."


def _environment(run: RunRecord) -> Iterable[tuple[str, str]]:
    environment = last_begin(run).get("environment", {})
    yield from ((name, _value(value)) for name, value in {**run.origin, **environment}.items() if name != "versions")
    yield from run.versions.items()


def _checkpoint_rows(run: RunRecord) -> Iterable[tuple[str, str, str, str]]:
    for checkpoint in run.checkpoints:
        size = "" if checkpoint.size is None else readable_bytes(checkpoint.size)
        when = _when(checkpoint.at) if checkpoint.at else ""
        when = "by an earlier run in this folder" if checkpoint.is_earlier else when
        yield checkpoint.name, str(checkpoint.step), size, when if checkpoint.exists else f"{when}, deleted since"


def _median_throughput(run: RunRecord) -> str:
    rates = [value for _, value in run.points(THROUGHPUT)]
    return in_digits(median(rates)) if rates else ""


# -- text ------------------------------------------------------------------------------------------------------------


def _rows(rows: Iterable[Sequence[str]]) -> list[dict[str, Any]]:
    return [{"cells": list(row), "is_best": False} for row in rows]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _when(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OSError, OverflowError, ValueError):
        return "an impossible time"
