"""Read runs from their folders, also those of other trainers, for the commands that show them."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hftrain.arguments.processes import changed_settings
from hftrain.arguments.training import TrainingArguments
from hftrain.checkpoint.manifest import ARGUMENTS, JOURNAL, MANIFEST, TRAINER_STATE, checkpoint_step, is_foreign
from hftrain.checkpoint.rotation import by_commit, readable
from hftrain.checkpoint.state_files import load_part
from hftrain.core.errors import CheckpointError, ConfigError, check_known
from hftrain.core.extras import extra
from hftrain.core.state import find_misfit
from hftrain.extras.flight.reading import read_ledger, total_loss
from hftrain.loggers.base import flatten
from hftrain.storage.files import is_url, local_folder, read_json, walk_files

Point = tuple[float, float]
# More runs than these share one legend and one title, and show one loss.
FEW_RUNS = 3
# Values of a log entry that are not metrics: its position, its times and speeds.
_POSITIONS = ("step", "epoch", "total_flos", "num_input_tokens_seen")
_SPEED_SUFFIXES = ("_runtime", "_per_second")
_RUNTIME = "_runtime"
# Only in the last entry of a training, its summary.
TOTAL = "train_runtime"
_LARGEST = 1 << 62
# Values that the journal adds to the entries of training.
THROUGHPUT, MEMORY = "samples_per_s", {"host": "host_memory_gb", "device": "device_memory_gb"}

# Required fields of a journal's lines, and the types of these and other fields; other lines are skipped.
_FIELDS = {
    "begin": {"at", "step"},
    "log": {"at", "entry", "samples", "trained_s", "memory"},
    "save": {"at", "step", "name"},
    "end": {"at", "step"},
}
_ORIGIN = ("code", "seed", "parameters", "command")
_NUMBERS = ("at", "step", "samples", "trained_s", "size", "num_logged")
_TYPES = {
    "name": str,
    **dict.fromkeys(("entry", "memory", "arguments", "plan", "environment", "config"), dict),
    "earlier": list,
}


class Session(NamedTuple):
    """The times, in seconds since the epoch, and the steps of the journal's first and last line for one begin."""

    start_s: float
    first_step: float
    end_s: float
    last_step: float


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint: its size in bytes, None if unknown; whether it still exists, and is from an earlier run."""

    name: str
    step: int
    size: int | None = None
    at: float | None = None
    exists: bool = True
    is_earlier: bool = False


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, as its files tell it.

    Args:
        name: A short name, unique among the shown runs.
        state: The newest documented state that was saved; empty if there is none.
        log: The times and numbers of the log entries in order, without those that a resume has superseded. Times are in
            seconds since the epoch, NaN without a journal; with one, those of training have `THROUGHPUT` and `MEMORY`.
        checkpoints: The checkpoints in commit order.
        events: The journal's events since the run's first begin, except logs.
        sessions: Those of the journal, including superseded ones.
        arguments: The arguments that differ from their defaults; None if unknown.
        origin: The code's version, the seed, the number of parameters, the command, and what configured task and data.
        num_unread: The number of lines of the journal that could not be read.
    """

    name: str
    folder: str
    state: Mapping[str, Any]
    log: Sequence[tuple[float, Mapping[str, float]]]
    checkpoints: Sequence[Checkpoint]
    events: Sequence[Mapping[str, Any]]
    sessions: Sequence[Session]
    arguments: Mapping[str, Any] | None
    versions: Mapping[str, str]
    origin: Mapping[str, Any] = field(default_factory=dict)
    num_earlier: int = 0
    num_unread: int = 0

    def points(self, metric: str) -> list[Point]:
        """Return (step, value) for each entry with a metric, including NaN and infinite values."""
        return [(step, value) for step, value, *_ in self.rows(metric)]

    def rows(self, metric: str) -> list[tuple[int, float, float, float]]:
        """Return (step, value, epoch, time) for each entry with a metric; epoch and time are NaN if unknown."""
        return [
            (int(entry["step"]), entry[metric], entry.get("epoch", math.nan), at_s)
            for at_s, entry in self.log
            if metric in entry and TOTAL not in entry
        ]

    def subject(self, metric: str) -> str:
        """Return a metric's name without the prefix of its evaluation; equal for comparable metrics."""
        prefixes = [prefix for prefix in self._prefixes if metric.startswith(f"{prefix}_")]
        return metric.removeprefix(f"{max(prefixes, key=len)}_") if prefixes else metric

    @cached_property
    def metrics(self) -> list[str]:
        """The names of the logged metrics, in the order of their first values."""
        names = dict.fromkeys(name for _, entry in self.log if TOTAL not in entry for name in entry)
        return [name for name in names if name not in _POSITIONS and not name.endswith(_SPEED_SUFFIXES)]

    @cached_property
    def _prefixes(self) -> set[str]:
        return {name.removesuffix(_RUNTIME) for _, entry in self.log for name in entry if name.endswith(_RUNTIME)}


def is_number(value: Any) -> bool:
    """Tell whether a logged value is a number; bools, and integers that no float holds, are not."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, float) or (is_whole and -_LARGEST <= value <= _LARGEST)


def _timed(entry: Mapping[str, Any], at_s: float = math.nan) -> tuple[float, dict[str, float]]:
    """Return an entry's time and its numbers; none of an entry without a step."""
    step = entry.get("step")
    has_step = is_number(step) and abs(step) < _LARGEST  # type: ignore[arg-type]
    return at_s, {name: float(value) for name, value in entry.items() if has_step and is_number(value)}


def read_runs(folders: Sequence[str]) -> list[RunRecord]:
    """Read runs, each named by the shortest distinct end of its path.

    Args:
        folders: Output folders or their URLs; also checkpoints, or folders with a `trainer_state.json`.

    Raises:
        ConfigError: A folder is not that of a run.
    """
    return [read_run(folder, name=name) for folder, name in zip(folders, _short_names(folders), strict=True)]


def read_run(folder: str, *, name: str) -> RunRecord:
    """Read one run; see `read_runs`."""
    if is_url(folder):
        with tempfile.TemporaryDirectory() as copy:
            _fetch(folder, Path(copy))
            return _read(Path(copy), folder, name=name)
    path = local_folder(folder, start=Path())
    return _read(path.parent if path.name in (TRAINER_STATE, JOURNAL) else path, folder, name=name)


def thinned(values: Sequence[float], limit: int) -> list[int]:
    """Return the places of about `limit` values: the ends and extremes of each interval, to keep a curve's shape.

    One NaN or infinite value of each interval is kept.
    """
    if len(values) <= limit:
        return list(range(len(values)))
    size = math.ceil(len(values) / (limit // 4))
    positions: list[int] = []
    for start in range(0, len(values), size):
        interval = range(start, min(start + size, len(values)))
        finite = [position for position in interval if math.isfinite(values[position])]
        positions_of_interval = {interval[0], interval[-1]}
        if finite:
            positions_of_interval |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < len(interval):
            positions_of_interval.add(next(position for position in interval if not math.isfinite(values[position])))
        positions += sorted(positions_of_interval)
    return positions


def chosen_metrics(runs: Sequence[RunRecord], requested: Iterable[str]) -> list[str]:
    """Return the requested metrics; by default the losses of training and evaluation, of many runs one of the two.

    Raises:
        ConfigError: No run has logged a requested metric.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    losses = [name for name in names if any(run.subject(name) == "loss" for run in runs)]
    if len(runs) > FEW_RUNS:
        losses = [name for name in losses if name != "loss"][:1] or losses
    metrics = list(requested) or losses or names[:1]
    for name in metrics:
        check_known(name, names, f"Cannot show the metric {name!r}.", "No run has logged it.")
    if not metrics:
        raise ConfigError(f"Cannot show {runs[0].folder!r}.", unlogged(runs[0]))
    return metrics


def unlogged(run: RunRecord) -> str:
    """Return why a run has no curves, and what to set for some."""
    interval = (run.arguments or {}).get("logging_steps", TrainingArguments.logging_steps)
    step = int(max([run.state.get("global_step", 0), *(session.last_step for session in run.sessions)]))
    why = f"{run.name} has logged nothing in {step} steps, with logging_steps={interval}."
    return f"{why} Set a smaller logging_steps, or train with Trainer(flight_log=True), whose steps are drawn then."


def _short_names(folders: Sequence[str]) -> list[str]:
    paths = [folder if is_url(folder) else Path(folder).resolve().as_posix() for folder in folders]
    parts = [path.rstrip("/").split("/") for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path_parts[-length:]) for path_parts in parts]
        if len(set(names)) == len(names):
            return names
    return list(folders)


def _fetch(url: str, copy: Path) -> None:
    """Copy what is read of a remote run, which is little: no weights."""
    remote = extra("remote").RemoteFolder(url)
    try:
        for folder in remote.names():
            if checkpoint_step(folder) is not None:
                for name in (MANIFEST, TRAINER_STATE, ARGUMENTS):
                    remote.mirror(f"{folder}/{name}", copy / folder / name)
            elif folder in (JOURNAL, TRAINER_STATE):
                remote.mirror(folder, copy / folder)
    except OSError as error:
        raise ConfigError(f"Cannot read {url!r}.", f"{str(error).rstrip('.')}.", "Check the URL.") from error


def _read(path: Path, folder: str, *, name: str) -> RunRecord:
    paths = by_commit(path) if path.is_dir() else []
    states = [state for state_folder in (*reversed(paths), path) if (state := _read_state(state_folder)) is not None]
    # `save_state` may have written a newer state to the output folder than that of the last checkpoint.
    state = max(states[:1] + states[-1:], key=lambda state: state.get("global_step", 0), default={})
    journal = _Journal(state.get("log_history", []))
    journal.read(path / JOURNAL)
    if not states and not journal.num_lines:
        reason = f"It holds no readable {JOURNAL} or {TRAINER_STATE}." if path.is_dir() else "There is no such folder."
        raise ConfigError(f"Cannot read a run from {folder!r}.", reason, "Name the output_dir of a run.")
    if not any(entry.keys() - {*_POSITIONS} for _, entry in journal.log if TOTAL not in entry):
        for step, lines in read_ledger(path).items():
            losses, norm = list(map(total_loss, lines)), lines[0].get("norm")
            journal.log.append(_timed({"step": step, "loss": sum(losses) / len(losses), "grad_norm": norm}))
    begin: Mapping[str, Any] = next((line for line in reversed(journal.events) if line["event"] == "begin"), {})
    manifest = next((found for each in reversed(paths) if (found := readable(each)) is not None), None)
    versions, config = begin.get("environment", {}).get("versions"), flatten(begin.get("config", {}))
    # As they are written on the command line.
    config = {name.replace(".init_args.", "."): value for name, value in config.items() if value != {}}
    return RunRecord(
        name=name,
        folder=folder,
        state=state,
        log=journal.log,
        checkpoints=_checkpoints(paths, journal.events, has_earlier=journal.num_runs > 1),
        events=journal.events,
        sessions=[Session(*points[0], *points[-1]) for points in journal.sessions if points],
        arguments=begin.get("arguments") if begin else _arguments(paths),
        versions=versions if versions and isinstance(versions, dict) else manifest.versions if manifest else {},
        origin={name: begin[name] for name in _ORIGIN if name in begin} | config,
        num_earlier=max(0, journal.num_runs - 1),
        num_unread=journal.num_unread,
    )


def _read_state(folder: Path) -> dict[str, Any] | None:
    """Return the documented state in a folder, None if it is missing or cannot be read."""
    try:
        content = read_json(folder / TRAINER_STATE)
    except CheckpointError:
        return None
    return content if find_misfit(content) is None else None


class _Journal:
    """Read a journal line by line: what is superseded by a resume, or belongs to an earlier run, is dropped."""

    def __init__(self, saved: Sequence[Mapping[str, Any]]) -> None:
        self._saved_log = saved  # the log of the newest state: all there is without a journal
        self.num_lines = self.num_unread = self.num_runs = 0
        self._reset()
        self.log.extend(map(_timed, saved))

    def _reset(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.log: list[tuple[float, dict[str, float]]] = []
        self.sessions: list[list[Point]] = []
        self._has_ended = False
        self._samples, self._trained_s = 0, 0.0

    def read(self, path: Path) -> None:
        """Read the file, if it exists; lines that cannot be read are counted."""
        if not path.is_file():
            return
        with open(path, encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):
                    line = None  # torn by a kill or a full disk
                if _is_readable(line):
                    if not self.num_lines:
                        self._reset()
                    self.num_lines += 1
                    self._add(line)
                elif text.endswith("\n"):  # else it is being written
                    self.num_unread += 1

    def _add(self, line: dict[str, Any]) -> None:
        event = line["event"]
        # A run resumed from a checkpoint of another folder is new in this one.
        if event == "begin" and ("earlier" in line or not line.get("resumed_from")):
            self.num_runs += 1
            self._reset()
        if event == "begin":
            self._begin(line)
        elif event == "log":
            self._add_entry(line)
        if event != "log":
            self.events.append(line)
        step = line.get("entry", line).get("step")
        if event == "begin" or not self.sessions:
            self.sessions.append([])
            self._has_ended = False
        # A later evaluation, perhaps after hours, is not part of the session.
        if is_number(step) and not self._has_ended:
            self.sessions[-1][1:] = [(line["at"], step)]
        self._has_ended |= event == "end"

    def _begin(self, line: Mapping[str, Any]) -> None:
        num_logged = int(line.get("num_logged", 0))
        # The earlier entries may be in the journal of another folder.
        if "earlier" not in line and len(self.log) >= num_logged:
            del self.log[max(num_logged, 0) :]
        else:
            earlier = line.get("earlier", self._saved_log[:num_logged])
            self.log = [_timed(entry) for entry in earlier if isinstance(entry, dict)]
        self._samples, self._trained_s = 0, 0.0

    def _add_entry(self, line: Mapping[str, Any]) -> None:
        """Add an entry, with the speed since the one before: the journal holds running sums."""
        took_s, trained = line["trained_s"] - self._trained_s, line["samples"] - self._samples
        entry = line["entry"]
        if trained > 0 and took_s > 0:
            entry[THROUGHPUT] = trained / took_s
            for kind, size in line["memory"].items():
                if kind in MEMORY and is_number(size):
                    entry[MEMORY[kind]] = size / 1e9
            self._samples, self._trained_s = line["samples"], line["trained_s"]
        self.log.append(_timed(entry, line["at"]))


def _is_readable(line: Any) -> bool:
    """Tell whether a line has its event's fields in their types: a disk may have damaged it, or an editor."""
    if not isinstance(line, dict) or not line.keys() >= _FIELDS.get(str(line.get("event")), {"?"}):
        return False
    numbers = all(is_number(line[name]) and math.isfinite(line[name]) for name in _NUMBERS if name in line)
    return numbers and all(isinstance(line[name], kind) for name, kind in _TYPES.items() if name in line)


def _checkpoints(paths: Sequence[Path], lines: Sequence[Mapping[str, Any]], *, has_earlier: bool) -> list[Checkpoint]:
    """Return the existing checkpoints, and deleted ones that the journal lists."""
    saves = {line["name"]: line for line in lines if line["event"] == "save"}
    existing = {path.name: path for path in paths}
    checkpoints = []
    for name in dict.fromkeys([*saves, *existing]):
        line = saves.get(name, {})
        size = line.get("size")
        if size is None and name in existing:
            manifest = readable(existing[name])
            files = (file.stat().st_size for file in walk_files(existing[name]))
            size = sum(files) if manifest is None else sum(record["size"] for record in manifest.files.values())
        step = line.get("step", checkpoint_step(name) or 0)
        is_earlier = has_earlier and not line
        checkpoints.append(
            Checkpoint(
                name=name, step=step, size=size, at=line.get("at"), exists=name in existing, is_earlier=is_earlier
            )
        )
    return checkpoints


def _arguments(paths: Sequence[Path]) -> dict[str, Any] | None:
    """Return the changed arguments of a checkpoint; None if they are pickled, because pickles are never read."""
    for path in reversed(paths):
        if not is_foreign(path):
            try:
                return changed_settings(load_part(path, ARGUMENTS), TrainingArguments)
            except CheckpointError:
                continue
    return None
