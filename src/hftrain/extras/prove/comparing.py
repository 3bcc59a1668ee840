"""Compare the numbers of two trainings, and name the first that differs and how."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

# Relative to the largest number of a tensor, or of its kind where that is much larger: rounding in another order.
BOUND = 1e-8
_FLOOR = 1e-4


@dataclass(frozen=True)
class Difference:
    """The first number in which two trainings differ.

    Args:
        step: The step, from 1.
        what: Which number, or which tensor.
        found: How it differs, in words.
    """

    step: int
    what: str
    found: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.what} {self.found}"


class Recording:
    """The numbers of a leg: those of its first process, tensors of all, which have to agree."""

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem[4:]))
        self.ranks: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        self.facts = self.ranks[0]
        self.steps: dict[int, dict[str, Any]] = {int(step): each for step, each in self.facts["steps"].items()}
        self.tensors: dict[tuple[str, int, str], torch.Tensor] = {}
        self.apart: Difference | None = None
        for rank, path in enumerate(paths):
            for name, each in load_file(path.with_suffix(".safetensors")).items():
                kind, step, own = name.split("/", 2)
                first = self.tensors.setdefault((kind, int(step), own), each)
                if first is not each and self.apart is None and not torch.equal(first, each):
                    self.apart = Difference(int(step), f"{kind} {own}", f"of rank {rank} is not that of rank 0")

    def samples(self, step: int) -> list[str]:
        """Return the samples of a step, sorted; those of ranks that read the same ones once."""
        by_rank = {each["data_rank"]: each["steps"].get(str(step), {}).get("samples", []) for each in self.ranks}
        return sorted(sample for batches in by_rank.values() for batch in batches for sample in batch)

    def items(self, step: int) -> float | None:
        """Return the item count that each micro-batch of a step was given; None if there was none."""
        found: list[float | None] = self.steps.get(step, {}).get("items", [])
        return found[0] if found else None


def compare(
    one: Recording, two: Recording, counts: Mapping[str, float], *, bound: float = BOUND, steps: range | None = None
) -> Difference | None:
    """Return in what the first training differs first from the second; None if in nothing.

    Args:
        counts: Numbers by which a value may be wrong, by what they count: of processes, of micro-batches.
        bound: The largest distance, relative; 0 compares to the bit.
        steps: Which steps to compare; None: all that both have.
    """
    for step in sorted(one.steps.keys() & two.steps.keys()) if steps is None else steps:
        if one.samples(step) != two.samples(step):
            return Difference(step, "the samples", "are others")
        mine, other = one.steps.get(step, {}), two.steps.get(step, {})
        numbers = [("the item count", one.items(step), two.items(step)), ("the loss", mine.get("loss"), other.get("loss"))]
        for what, value, expected in numbers:
            if found := _apart(value, expected, counts, bound):
                return Difference(step, what, found)
        for kind in ("gradient", "weights", "optimizer"):
            if found := _first_tensor(one, two, kind, step, counts, bound):
                return found
            if kind == "gradient" and (found := _apart(mine.get("grad_norm"), other.get("grad_norm"), counts, bound)):
                return Difference(step, "the gradient norm", found)
        if found := _apart(mine.get("learning_rate"), other.get("learning_rate"), counts, bound):
            return Difference(step, "the learning rate", found)
    return None


def compare_evaluations(one: Recording, two: Recording, counts: Mapping[str, float]) -> Difference | None:
    """Return in which metric or prediction an evaluation differs first from another one; None if in none."""
    step = one.facts["leg"]["steps"]
    mine, other = one.facts.get("metrics", {}), two.facts.get("metrics", {})
    for name in [*mine, *(other.keys() - mine.keys())]:
        if found := _apart(mine.get(name), other.get(name), counts, BOUND):
            return Difference(step, name, found)
    return _first_tensor(one, two, "predictions", step, counts, BOUND)


def _first_tensor(
    one: Recording, two: Recording, kind: str, step: int, counts: Mapping[str, float], bound: float
) -> Difference | None:
    mine, other = _of(one, kind, step), _of(two, kind, step)
    if kind != "gradient" and not (mine and other):  # kept of the last step only, or of one process
        return None
    largest = max((float(each.abs().max()) for each in other.values() if each.numel()), default=0.0)
    for name in [*mine, *(other.keys() - mine.keys())]:
        if name not in mine or name not in other:
            return Difference(step, f"{kind} {name}", "is in one training only")
        value, expected = mine[name], other[name]
        if value.shape != expected.shape:
            return Difference(step, f"{kind} {name}", f"has the shape {[*value.shape]}, not {[*expected.shape]}")
        own = max(float(expected.abs().max()) if expected.numel() else 0.0, _FLOOR * largest)
        is_alike = torch.equal(value, expected) if not bound else bool(((value - expected).abs() <= bound * own).all())
        if not is_alike:
            return Difference(step, f"{kind} {name}", _in_words(value, expected, counts))
    return None


def _of(recording: Recording, kind: str, step: int) -> dict[str, torch.Tensor]:
    found = {name: each for (of, at, name), each in recording.tensors.items() if of == kind and at == step}
    return {name: each.double() for name, each in found.items()}


def _in_words(value: torch.Tensor, expected: torch.Tensor, counts: Mapping[str, float]) -> str:
    square = float((expected * expected).sum())
    ratio = float((value * expected).sum()) / square if square else math.inf
    rest = (value - ratio * expected).abs().max() if square else math.inf
    if float(rest) <= 1e-6 * float(value.abs().max()):
        return f"is {_times(ratio, counts)}"
    distance = float((value - expected).norm() / expected.norm()) if square else math.inf
    return f"differs by {distance:.1e} of its norm"


def _apart(value: float | None, expected: float | None, counts: Mapping[str, float], bound: float) -> str | None:
    """Return how a number differs from the expected one, in words; None if it does not."""
    if value is None or expected is None:
        return None if value == expected else "is in one training only"
    if str(value) == str(expected) or abs(value - expected) <= bound * max(abs(value), abs(expected)):
        return None
    if expected and any(True for _ in _reasons(value / expected, counts)):
        return f"is {value:.9g}, {_times(value / expected, counts)} {expected:.9g}"
    return f"is {value:.9g}, not {expected:.9g}"


def _times(ratio: float, counts: Mapping[str, float]) -> str:
    reasons = "".join(f" ({reason})" for reason in _reasons(ratio, counts))
    return f"{ratio:.6g} times{reasons}"


def _reasons(ratio: float, counts: Mapping[str, float]) -> Iterator[str]:
    for what, number in counts.items():
        if number != 1 and math.isclose(ratio, number, rel_tol=1e-6):
            yield f"the {what}"
        elif number != 1 and math.isclose(ratio * number, 1, rel_tol=1e-6):
            yield f"1 / the {what}"
