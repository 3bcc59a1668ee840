"""Run a client's script with each Trainer, in a process of its own, and compare what came of it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from support.distributed import run_command

RUN = Path(__file__).with_name("run.py")
TOLERANCE = 1e-4

# How fast it went is no result; neither is what transformers alone estimates or hftrain alone reports.
TIMES = ("runtime", "_per_second", "_model_preparation_time", "total_flos", "step_time", "/time", "num_tokens")

# Files of a checkpoint that transformers has none like: what makes it whole, and the weights of a loss.
OURS = {"manifest.json", "outside_weights.safetensors"}


@dataclass
class Outcome:
    """What one run left."""

    folder: Path
    out: Path
    history: list[dict[str, Any]]
    more: dict[str, Any]
    files: dict[str, list[str]]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The trained weights by their names."""
        found: dict[str, torch.Tensor] = torch.load(self.folder / "final.pt", weights_only=True)
        return found


def run_client(
    client: str, library: str, folder: Path, *, processes: int = 1, name: str = "", options: tuple[str, ...] = ()
) -> Outcome:
    """Run a client's script in a process of its own, or in several, with `transformers` or `hftrain`.

    Args:
        client: The script's name.
        library: Whose Trainer it derives from.
        folder: Where the folder of this run is made.
        processes: How many ranks torchrun starts; their weights are to be the same, to the bit.
        name: The name of this run's folder, the library's by default.
        options: More options of `run.py`.
    """
    place = folder / (name or library)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, "-W", "ignore", *(launcher if processes > 1 else []), str(RUN), client, library]
    returncode, output = run_command([*command, str(place), *options], folder, {}, timeout_s=280)
    assert returncode == 0, f"{client} with {library}:\n{output[-6000:]}"
    ranks = [place / f"rank-{rank}" for rank in range(processes)] if processes > 1 else [place]
    found = [json.loads((rank / "result.json").read_text(encoding="utf-8")) for rank in ranks]
    assert {each["processes"] for each in found} == {processes}
    outcome = Outcome(ranks[0], place / "out", found[0]["history"], found[0]["more"], found[0]["files"])
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
        names = {name for name in (*theirs, *ours) if not any(fnmatch(name, pattern) for pattern in ignored)}
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


def compare_weights(theirs: Outcome, ours: Outcome) -> list[str]:
    """Compare the trained weights, and those in the checkpoints."""
    found = same_tensors(theirs.weights, ours.weights, where="weights")
    for checkpoint, files in theirs.files.items():
        for name in files:
            if name.endswith(".safetensors"):
                paths = [outcome.out / checkpoint / name for outcome in (theirs, ours)]
                if paths[1].exists():
                    found += same_tensors(*map(load, paths), where=f"{checkpoint}/{name}")
    return found


def same_tensors(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], *, where: str) -> list[str]:
    """Name the tensors that differ by more than the tolerance."""
    if theirs.keys() != ours.keys():
        return [f"{where}: {sorted(theirs.keys() ^ ours.keys())} in one of the two only"]
    gaps = {
        name: float((theirs[name].double() - ours[name].double()).abs().max())
        for name in theirs
        if theirs[name].numel()
    }
    return [f"{where}.{name}: {gap} apart" for name, gap in gaps.items() if not gap <= TOLERANCE]


def load(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file."""
    from safetensors.torch import load_file

    return load_file(path)


def compare_files(theirs: Outcome, ours: Outcome) -> list[str]:
    """Compare the names of the checkpoints and of their files; hftrain's hold a manifest more."""
    if list(theirs.files) != list(ours.files):
        return [f"checkpoints: {list(theirs.files)} and {list(ours.files)}"]
    found = []
    for checkpoint, files in theirs.files.items():
        missing = set(files) - set(ours.files[checkpoint])
        extra = set(ours.files[checkpoint]) - set(files) - OURS
        found += [
            f"{checkpoint}: {sorted(names)} {word}" for names, word in ((missing, "missing"), (extra, "extra")) if names
        ]
    return found


def compare(
    theirs: Outcome, ours: Outcome, *, ignored: tuple[str, ...] = (), returned_only: tuple[str, ...] = ()
) -> list[str]:
    """Return all that differs, but for names that a rule leaves out: everywhere, or in what the script returned."""
    return [
        *compare_logs(theirs, ours, ignored=ignored, more=returned_only),
        *compare_files(theirs, ours),
        *compare_weights(theirs, ours),
    ]
