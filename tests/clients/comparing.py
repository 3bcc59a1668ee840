"""Run clients' scripts with each Trainer, in a process of its own, and compare what came of it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from clients.cases import NO_GRADIENT
from support.distributed import run_command

RUN = Path(__file__).with_name("run.py")
# Logged numbers; the trained weights are compared more closely.
TOLERANCE = 1e-4
WEIGHTS_TOLERANCE = 1e-6
TIME_LIMIT_S = 1500

# How fast it went is no result; neither is what transformers alone estimates or hftrain alone reports.
TIMES = ("runtime", "_per_second", "_model_preparation_time", "total_flos", "step_time", "/time", "num_tokens")

# Files of a checkpoint that transformers has none like: what makes it whole, and the weights of a loss.
OURS = {"manifest.json", "outside_weights.safetensors"}


@dataclass
class Outcome:
    folder: Path
    out: Path
    history: list[dict[str, Any]]
    more: dict[str, Any]
    files: dict[str, list[str]]
    trainer: str
    overridden: list[str]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.folder / "final.pt", weights_only=True)
        return found


def run_clients(
    clients: tuple[str, ...],
    library: str,
    folder: Path,
    *,
    accumulation: tuple[int, ...],
    processes: int = 1,
    options: tuple[str, ...] = (),
) -> None:
    """Run clients' scripts in a process, or in several, with `transformers` or `hftrain`.

    Args:
        clients: The scripts' modules and functions.
        library: Whose Trainer they derive from.
        folder: Where each has a folder.
        accumulation: The numbers of micro-batches in a step; each client trains once for each.
        processes: How many ranks torchrun starts.
        options: More options of `run.py`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, "-W", "ignore", *(launcher if processes > 1 else []), str(RUN), library, str(folder)]
    numbers = ("--accumulation", *map(str, accumulation))
    returncode, output = run_command([*command, *clients, *numbers, *options], folder, {}, timeout_s=TIME_LIMIT_S)
    assert returncode == 0, f"{library}:\n{output[-6000:]}"


def read_outcome(place: Path, accumulation: int, processes: int = 1) -> Outcome:
    """Read what a run left; the weights of all ranks are to be the same, to the bit."""
    ranks = [place / f"rank-{rank}" for rank in range(processes)] if processes > 1 else [place]
    for error in place.rglob("error.txt"):
        raise AssertionError(f"{place}:\n{error.read_text(encoding='utf-8')}")
    found = [json.loads((rank / "result.json").read_text(encoding="utf-8")) for rank in ranks]
    assert {(each.pop("processes"), each.pop("accumulation")) for each in found} == {(processes, accumulation)}
    outcome = Outcome(ranks[0], place / "out", **found[0])
    for rank in ranks[1:]:
        assert_same_bits(outcome.weights, torch.load(rank / "final.pt", weights_only=True))
    return outcome


def assert_same_bits(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    """Fail unless two runs, or two ranks, hold the same tensors."""
    assert some.keys() == others.keys()
    assert [name for name in some if not torch.equal(some[name], others[name])] == []


def without_times(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of a log history without how long things took."""
    return {name: value for name, value in entry.items() if not any(part in name for part in TIMES)}


def differences(theirs: Any, ours: Any, *, where: str = "", ignored: tuple[str, ...] = ()) -> list[str]:
    """Name the numbers that differ by more than the tolerance, and what only one of the two has.

    Args:
        theirs: What transformers' Trainer left.
        ours: What hftrain's left.
        where: Its name, for messages.
        ignored: Patterns of names that are not compared.
    """
    if isinstance(theirs, dict) and isinstance(ours, dict):
        names = {name for name in (*theirs, *ours) if not matches(name, ignored)}
        missing = [
            f"{where}: {name} in one of the two only" for name in sorted(names) if (name in theirs) != (name in ours)
        ]
        both = [name for name in theirs if name in ours and name in names]
        return missing + [d for name in both for d in differences(theirs[name], ours[name], where=f"{where}.{name}")]
    if isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) != len(ours):
            return [f"{where}: {len(theirs)} entries and {len(ours)}"]
        return [
            d
            for number, (a, b) in enumerate(zip(theirs, ours, strict=True))
            for d in differences(a, b, where=f"{where}[{number}]", ignored=ignored)
        ]
    if isinstance(theirs, (int, float)) and isinstance(ours, (int, float)):
        is_close = theirs == ours or abs(theirs - ours) <= TOLERANCE * max(1.0, abs(theirs))
        both_nan = theirs != theirs and ours != ours
        return [] if is_close or both_nan else [f"{where}: {theirs} and {ours}"]
    return [] if theirs == ours else [f"{where}: {theirs!r} and {ours!r}"]


def compare_logs(theirs: Outcome, ours: Outcome, *, ignored: tuple[str, ...], more: tuple[str, ...]) -> list[str]:
    """Compare the log histories, but for times, and what the script returned."""
    logs = [[without_times(entry) for entry in outcome.history] for outcome in (theirs, ours)]
    returned = [without_times(outcome.more) for outcome in (theirs, ours)]
    ignored_there = (*ignored, *more)
    return differences(*logs, where="log", ignored=ignored) + differences(
        *returned, where="returned", ignored=ignored_there
    )


def compare_checkpoints(theirs: Outcome, ours: Outcome) -> list[str]:
    found = []
    for checkpoint, files in theirs.files.items():
        for name in files:
            paths = [outcome.out / checkpoint / name for outcome in (theirs, ours)]
            if name.endswith(".safetensors") and paths[1].exists():
                gap = largest_gap(*map(load, paths))
                found += [f"{checkpoint}/{name}: {gap} apart"] if not gap <= TOLERANCE else []
    return found


def largest_gap(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two numbers at the same place; NaN if one run has other tensors."""
    if theirs.keys() != ours.keys():
        return float("nan")
    names = [name for name in theirs if theirs[name].numel() and not matches(name, NO_GRADIENT)]
    return float(torch.stack([(theirs[name].double() - ours[name].double()).abs().max() for name in names]).max())


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def compare_files(theirs: Outcome, ours: Outcome, ignored: tuple[str, ...]) -> list[str]:
    """Compare the names of the checkpoints and of their files; hftrain's hold a manifest more."""
    if list(theirs.files) != list(ours.files):
        return [f"checkpoints: {list(theirs.files)} and {list(ours.files)}"]
    found = []
    for checkpoint, files in theirs.files.items():
        missing = set(files) - set(ours.files[checkpoint]) - set(ignored)
        extra = set(ours.files[checkpoint]) - set(files) - OURS
        found += [
            f"{checkpoint}: {sorted(names)} {word}" for names, word in ((missing, "missing"), (extra, "extra")) if names
        ]
    return found


def compare(
    theirs: Outcome, ours: Outcome, *, ignored: tuple[str, ...] = (), returned_only: tuple[str, ...] = ()
) -> list[str]:
    """Return all that differs but the trained weights.

    Args:
        theirs: What transformers' Trainer left.
        ours: What hftrain's left.
        ignored: Patterns of logged names that a rule leaves out.
        returned_only: Such names in what the script returned.
    """
    return [
        *compare_logs(theirs, ours, ignored=ignored, more=returned_only),
        *compare_files(theirs, ours, ignored),
        *compare_checkpoints(theirs, ours),
    ]
