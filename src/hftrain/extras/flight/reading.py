"""Read the flight log of a run, and tell which values stand out."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from hftrain.core.extras import extra
from hftrain.storage.files import is_url, mirror_of

Lines = Mapping[int, Sequence[Mapping[str, Any]]]

FOLDER = "flight"
# A step is compared with so many before it, and not before there are so many.
WINDOW, MIN_STEPS = 128, 16
_SIGMAS, _DEVIATION = 6.0, 1.4826
# What a step has that is the same to the bit when it is done again, in the order in which it comes about.
EXACT = ("samples", "sample_losses", "losses", "items", "norm", "gradients", "rate", "skipped", "weights")


def flight_folder(run: str | Path) -> Path:
    """Return the folder of a run's flight log; of a remote run that of a local copy, brought up to date."""
    if not is_url(run):
        return Path(str(run).removeprefix("file://")) / FOLDER
    mirror, remote = mirror_of(str(run).rstrip("/")), extra("remote").RemoteFolder(str(run))
    folder = mirror.with_name(f"{mirror.name}-read") / FOLDER
    for name, size in remote.sizes(FOLDER).items():
        if not (folder / name).exists() or (folder / name).stat().st_size != size:
            remote.download(f"{FOLDER}/{name}", folder / name)
    return folder


def read_sessions(run: str | Path) -> list[dict[str, Any]]:
    """Return the lines with which the sessions of a run began, of its first process."""
    lines = lines_of(flight_folder(run), "rank0")
    return [line for line in lines if all(isinstance(line.get(name), int) for name in ("begin", "world_size"))]


def first_parting(lines: Lines, other_lines: Lines) -> tuple[int | None, list[str], str]:
    """Return the first common step whose lines differ in a process, the names of what differs, and two values."""
    for step in lines:
        for line, other_line in zip(lines[step], other_lines.get(step, ()), strict=False):
            if names := [name for name in EXACT if json.dumps(line.get(name)) != json.dumps(other_line.get(name))]:
                pairs = ((name, shortened(line.get(name)), shortened(other_line.get(name))) for name in names[:2])
                return step, names, ", ".join("{} {} and {}".format(*pair) for pair in pairs)
    return None, [], ""


def shortened(value: Any) -> str:
    """Return a value as JSON of at most 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_ledger(run: str | Path) -> dict[int, list[dict[str, Any]]]:
    """Return the lines of each step of a run, one per process that wrote it; damaged lines are left out.

    A step that a resumed run did again is there once, as it was done last. Of lines that a resume has left behind,
    those after the last one's first step are left out, and those of ranks that it does not have.
    """
    sessions = read_sessions(run)
    lines_by_step: dict[int, dict[str, dict[str, Any]]] = {}
    folder = flight_folder(run)
    ranks = sorted({path.name.split(".")[0] for path in folder.glob("rank*.jsonl*")}, key=lambda name: int(name[4:]))
    for rank in ranks:
        rank_lines: dict[int, dict[str, Any]] = {}
        for line in lines_of(folder, rank):
            if isinstance(begin := line.get("begin"), int):
                rank_lines = {step: own_line for step, own_line in rank_lines.items() if step <= begin}
            elif isinstance(step := line.get("step"), int):
                rank_lines[step] = line
        for step, line in rank_lines.items():
            sizes = [session["world_size"] for session in sessions if session["begin"] < step]
            if not sizes or int(rank[4:]) < sizes[-1]:
                lines_by_step.setdefault(step, {})[rank] = line
    return {step: list(lines_by_step[step].values()) for step in sorted(lines_by_step)}


def lines_of(folder: Path, rank: str) -> Iterator[dict[str, Any]]:
    """Yield the undamaged lines of a process in a folder of a flight log, such as those of ``rank0``."""
    for path in [*sorted(folder.glob(f"{rank}.*.jsonl.gz")), folder / f"{rank}.jsonl"]:
        reading = gzip.open if path.suffix == ".gz" else open
        # Of a damaged archive what is before the damage.
        with suppress(FileNotFoundError, EOFError, gzip.BadGzipFile, zlib.error), reading(path, "rb") as file:
            for text in file:
                try:
                    line = json.loads(text.decode("utf-8", errors="replace"))
                except ValueError:
                    continue
                if isinstance(line, dict):
                    yield line


def total_loss(line: Mapping[str, Any]) -> float:
    """Return the loss of a process's step; NaN if the line has none."""
    try:
        return float(sum(line["losses"]))
    except (KeyError, TypeError):
        return math.nan


def limit_of(others: Iterable[float]) -> float:
    """Return what is six deviations above the median; infinity if all values are NaN, which are ignored.

    The deviation is 1.4826 times the median absolute deviation.
    """
    numbers = sorted(value for value in others if not math.isnan(value))
    if not numbers:
        return math.inf
    middle = median(numbers)
    return middle + _SIGMAS * _DEVIATION * median([abs(number - middle) for number in numbers])
