"""What runs have left in their folders, read for the commands that show it; other trainers' folders will do."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hftrain.checkpoint.layout import ARGUMENTS, MANIFEST, TRAINER_STATE, checkpoint_step
from hftrain.checkpoint.rotation import by_commit
from hftrain.core.errors import CheckpointError, ConfigError, suggest
from hftrain.core.state import find_misfit
from hftrain.storage.files import read_json
from hftrain.storage.remote import RemoteFolder, is_url

# Of an entry of the log, what places it or measures it.
_PLACES = ("step", "epoch", "total_flos", "num_input_tokens_seen")
_SPEEDS = ("_runtime", "_per_second")
_RUNTIME = "_runtime"
# In the entry that sums up a training.
_TOTAL = "train_runtime"

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run.

    Args:
        name: What tells it from the other runs that are shown.
        folder: Where it lies, as it was given.
        state: The newest documented state.
        entries: What was logged, in order, each with its ``step``.
        checkpoints: The folders of its checkpoints in the order of their commits.
    """

    name: str
    folder: str
    state: Mapping[str, Any]
    entries: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[Path] = field(default_factory=tuple)

    def metrics(self) -> list[str]:
        """Return the names of the numbers that were logged over time, in the order in which they came."""
        curves = (entry for entry in self.entries if _TOTAL not in entry)
        names = dict.fromkeys(name for entry in curves for name, value in entry.items() if is_number(value))
        return [name for name in names if name not in _PLACES and not name.endswith(_SPEEDS)]

    def points(self, metric: str) -> list[Point]:
        """Return (step, value) for each entry with a metric; NaN and infinite values are among them."""
        return [(entry["step"], entry[metric]) for entry in self.entries if is_number(entry.get(metric))]

    def subject(self, metric: str) -> str:
        """Return a metric's name without the prefix of its evaluation: what it is comparable with."""
        prefixes = {key.removesuffix(_RUNTIME) for entry in self.entries for key in entry if key.endswith(_RUNTIME)}
        own = [prefix for prefix in prefixes if metric.startswith(f"{prefix}_")]
        return metric.removeprefix(f"{max(own, key=len)}_") if own else metric


def read_runs(folders: Sequence[str]) -> list[RunRecord]:
    """Read some runs, each named by the end of its path that tells it from the others.

    Args:
        folders: Output folders, or URLs of such; a checkpoint, or a folder with a `trainer_state.json`, will do.

    Raises:
        ConfigError: One of them is not a run's folder.
    """
    return [read_run(folder, name=name) for folder, name in zip(folders, _short_names(folders), strict=True)]


def read_run(folder: str, *, name: str) -> RunRecord:
    """Read one run; see `read_runs`."""
    if is_url(folder):
        with tempfile.TemporaryDirectory() as copy:
            _fetch(folder, Path(copy))
            return _read(Path(copy), folder, name=name)
    return _read(Path(folder), folder, name=name)


def is_number(value: Any) -> bool:
    """Tell whether a logged value is a number; bools are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most about `limit` points of a curve, so that it looks the same: of each stretch its extremes.

    NaN and infinite values stay, one of each stretch.
    """
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit // 4))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        part = range(start, min(start + size, len(points)))
        finite = [index for index in part if math.isfinite(points[index][1])]
        chosen = {part[0], part[-1]}
        if finite:
            chosen |= {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])}
        if len(finite) < len(part):
            chosen.add(next(index for index in part if not math.isfinite(points[index][1])))
        kept += [points[index] for index in sorted(chosen)]
    return kept


def chosen_metrics(runs: Sequence[RunRecord], asked: Iterable[str]) -> list[str]:
    """Return the metrics that were asked for; by default the losses of training and evaluation.

    Raises:
        ConfigError: No run has logged one of that name.
    """
    known = list(dict.fromkeys(name for run in runs for name in run.metrics()))
    asked = list(asked) or [name for name in known if any(run.subject(name) == "loss" for run in runs)] or known[:1]
    for name in asked:
        if name not in known:
            raise ConfigError(f"Cannot show the metric {name!r}.", "No run has logged it.", suggest(name, known))
    if not asked:
        raise ConfigError(f"Cannot show {runs[0].folder!r}.", "Nothing was logged.", "Wait for the first log entry.")
    return asked


def _short_names(folders: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths that differ."""
    parts = [folder.rstrip("/").split("/") for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(folders)


def _fetch(url: str, copy: Path) -> None:
    """Download the small files of a remote run."""
    remote = RemoteFolder(url)
    try:
        names = remote.names()
        folders = [name for name in names if checkpoint_step(name) is not None]
        wanted = [f"{folder}/{name}" for folder in folders for name in (MANIFEST, TRAINER_STATE, ARGUMENTS)]
        for name in [TRAINER_STATE, *wanted]:
            if "/" in name or name in names:
                _fetch_file(remote, name, copy)
    except OSError as error:
        raise ConfigError(f"Cannot read {url!r}.", f"{str(error).rstrip('.')}.", "Check the URL.") from error


def _fetch_file(remote: RemoteFolder, name: str, copy: Path) -> None:
    try:
        remote.download(name, copy / name)
    except FileNotFoundError:
        (copy / name).unlink(missing_ok=True)


def _read(path: Path, folder: str, *, name: str) -> RunRecord:
    if path.name == TRAINER_STATE:
        path = path.parent
    checkpoints = by_commit(path) if path.is_dir() else []
    states = [state for each in (*reversed(checkpoints), path) if (state := _read_state(each)) is not None]
    if not states:
        reason = (
            f"It holds no {TRAINER_STATE}, nor a checkpoint with one." if path.is_dir() else "There is no such folder."
        )
        raise ConfigError(f"Cannot read a run from {folder!r}.", reason, "Name the output_dir of a run.")
    # One that `save_state` has written at the end counts for more than the last checkpoint.
    state = max(states[:1] + states[-1:], key=lambda state: state.get("global_step", 0))
    entries = [entry for entry in state.get("log_history", []) if is_number(entry.get("step"))]
    return RunRecord(name=name, folder=folder, state=state, entries=entries, checkpoints=checkpoints)


def _read_state(folder: Path) -> dict[str, Any] | None:
    """Return the documented state in a folder, None if there is none that can be read."""
    try:
        content = read_json(folder / TRAINER_STATE)
    except CheckpointError:
        return None
    return content if find_misfit(content) is None else None
