"""Compare the numbers of two trainings, and name the first that differs and how."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

# By precision, relative to the largest number of a tensor, or to a part of the largest of its kind: rounding in another
# order. In float64, that of what a script computes in float32 whatever its inputs are; metrics are always such.
BOUNDS = {"fp64": 1e-6, "fp32": 1e-3, "metric": 1e-5}
_PART = 1e-4
# What comes about in a step, in this order.
STEP = ("loss", "gradient", "gradient norm", "weights", "optimizer", "learning rate")
EVALUATION = ("metric", "predictions")


class Difference(NamedTuple):
    """The first number in which two trainings differ: its step, from 1, what it is, and how it differs."""

    step: int
    what: str
    how: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.what} {self.how}"


class Recording:
    """What a training has written down; its processes have to agree on every number that several have.

    Args:
        folder: The folder of a `Recorder`.

    Attributes:
        ranks: What each process knows.
        numbers: Tensors by kind, step and name.
        apart: The first number on which processes do not agree.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem.removeprefix("rank")))
        self.ranks: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        self.numbers: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        self.apart: Difference | None = None
        for rank, path in enumerate(paths):
            for key, value in load_file(path.with_suffix(".safetensors")).items():
                kind, step, name = key.split("/", 2)
                first = self.numbers.setdefault((kind, int(step)), {}).setdefault(name, value)
                if self.apart is None and not torch.equal(first, value):
                    self.apart = Difference(int(step), f"{kind} {name}", f"of rank {rank} is not that of rank 0")

    def samples(self, step: int) -> list[list[str]]:
        """Return the samples that each data rank has read in a step, sorted."""
        found = {each["data_rank"]: each["samples"].get(str(step), []) for each in self.ranks}
        return [sorted(found[rank]) for rank in sorted(found)]

    @property
    def steps(self) -> range:
        """The steps that it has done, from 1."""
        steps = [step for kind, step in self.numbers if kind == "loss"]
        return range(min(steps, default=1), max(steps, default=0) + 1)


def compare(
    one: Recording, two: Recording, counts: Mapping[str, float], *, bound: float, kinds: Iterable[str] = STEP
) -> Difference | None:
    """Return in what the first training differs first from the second, in the steps that both did; None if in nothing.

    Args:
        counts: Numbers by which a value may be wrong, by what they count, such as processes.
        bound: The largest distance, relative; 0 compares to the bit.
        kinds: What to compare.
    """
    for step in one.steps:
        if step not in two.steps:
            continue
        if sorted(chain(*one.samples(step))) != sorted(chain(*two.samples(step))):
            return Difference(step, "the samples", "are others")
        for kind in kinds:
            mine, other = (each.numbers.get((kind, step), {}) for each in (one, two))
            if kind in ("weights", "optimizer") and not (mine and other):  # kept of some steps and trainings only
                continue
            largest = max((_size(each) for each in other.values()), default=0.0)
            for name in [*mine, *(other.keys() - mine.keys())]:
                if how := _difference(mine.get(name), other.get(name), counts, bound, _PART * largest):
                    return Difference(step, f"{kind} {name}".strip(), how)
    return None


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _difference(
    value: torch.Tensor | None, expected: torch.Tensor | None, counts: Mapping[str, float], bound: float, least: float
) -> str | None:
    """Return how a value differs from the expected one, in words; None if it does not."""
    if value is None or expected is None:
        return "is in one training only"
    if value.shape != expected.shape:
        return f"has the shape {[*value.shape]}, not {[*expected.shape]}"
    if torch.equal(value, expected) or (value.isnan().all() and expected.isnan().all()):
        return None
    if bound and _size(value - expected) <= bound * max(_size(expected), least):
        return None
    square = float((expected * expected).sum())
    ratio = float((value * expected).sum()) / square if square else math.nan
    told = [what for what, number in counts.items() if number != 1 and math.isclose(ratio, number, rel_tol=1e-6)]
    told += [
        f"1 / {what}"
        for what, number in counts.items()
        if number != 1 and math.isclose(ratio * number, 1, rel_tol=1e-6)
    ]
    reason = f" ({told[0]})" if told else ""
    if value.numel() == 1:
        return f"is {float(value):.9g}, not {float(expected):.9g}" + (f": {ratio:.6g} times{reason}" if told else "")
    if abs(ratio - 1) > 1e-3 and _size(value - ratio * expected) <= bound * _size(value):
        return f"is {ratio:.6g} times what it should be{reason}"
    return f"differs by {float((value - expected).norm()) / math.sqrt(square) if square else math.inf:.1e} of its norm"
