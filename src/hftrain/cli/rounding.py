"""Find where two runs whose numbers differ by rounding part by more than that."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hftrain.callbacks.base import TrainerCallback
from hftrain.extras.flight.observing import Calls, in_backward, in_words, innermost, own_part
from hftrain.extras.flight.reading import Lines, shortened, total_loss

# Times the distance that a perturbed run has had so far; relative, and at least the floor.
FACTOR, FLOOR = 10, 1e-5


@dataclass(eq=False)
class Perturb(TrainerCallback):
    """Move every trained parameter up or down by one unit in the last place when training begins.

    Args:
        unit: Such a unit of 1; at least that of the parameter's own type.
    """

    unit: float

    @torch.no_grad()
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move them, in all processes alike."""
        generator = torch.Generator().manual_seed(0)
        for own in (own_part(each) for each in kwargs["model"].parameters() if each.requires_grad):
            signs = own.sign().float() * (2 * torch.randint(2, own.shape, generator=generator) - 1).to(own.device)
            unit = max(self.unit, torch.finfo(own.dtype).eps)
            own.add_(torch.ldexp(signs * unit / 2, torch.frexp(own.float()).exponent).to(own.dtype))


def first_apart(mine: Lines, other: Lines, perturbed: Lines) -> tuple[int | None, list[str], str]:
    """Return the first step in which two runs are farther apart than rounding, the names of what is, and two values.

    Mean loss and norm may differ by ten times the largest distance that the perturbed run has had up to that step.
    """
    limits = {"loss": FLOOR, "norm": FLOOR}
    for step in sorted(mine.keys() & other.keys() & perturbed.keys()):
        one, two, third = (_summary(ledger[step]) for ledger in (mine, other, perturbed))
        limits = {name: max(limit, FACTOR * _distance(one[name], third[name])) for name, limit in limits.items()}
        names = [name for name in one if not _distance(one[name], two[name]) <= limits.get(name, 0.0)]
        if names:
            values = (f"{name} {shortened(one[name])} and {shortened(two[name])}" for name in names[:2])
            return step, names, ", ".join(values)
    return None, [], ""


def _summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    samples = [each for line in lines for part in line["samples"] for each in part or [None]]
    known = {name: lines[0].get(name) for name in ("items", "norm", "rate", "skipped")}
    loss = sum(map(total_loss, lines)) / len(lines)
    return {"samples": None if None in samples else sorted(samples, key=json.dumps), "loss": loss, **known}


def _distance(one: Any, two: Any) -> float:
    """Return how far apart two values are, relative to the larger one; 0 if one is not known."""
    if one is None or two is None or str(one) == str(two):
        return 0.0
    return abs(one - two) / max(abs(one), abs(two)) if isinstance(one, float) else math.inf


def first_module_apart(runs: Sequence[Sequence[Calls]], *, has_backward: bool) -> str | None:
    """Return the first module whose outputs, or their gradients, are farther apart than rounding; None if none is.

    Compared are norms over all processes and micro-batches, of tensors that have as many elements in both runs, which
    are followed by the perturbed one. Gradients are compared if `has_backward`.
    """
    for name in ("outputs", "gradients")[: 1 + has_backward]:
        mine, other, perturbed = (_squares(run, name) for run in runs)
        for key, (call, squares) in mine.items():
            if key not in other:
                return f"{call['module']} ({call['type']}) is called in one run only"
            for place, (size, square) in squares.items():
                (theirs, found), limit = other[key], FACTOR * _distance(square, perturbed[key][1][place][1])
                number, value = found.get(place, (0, 0.0))
                if number == size and not _distance(square, value) <= max(FLOOR, limit):
                    theirs = {**theirs, "inputs": call["inputs"]}  # whose bits differ
                    return in_words(innermost(call, runs[0][0]), theirs, is_backward=name == "gradients")
    return None


def _squares(run: Sequence[Calls], name: str) -> dict[Any, tuple[dict[str, Any], dict[int, tuple[int, float]]]]:
    """Return by module and call the first such call, and of each tensor its number of elements and sum of squares."""
    found: dict[Any, Any] = {}
    for calls in run:
        counts: Counter[Any] = Counter()
        for call in calls if name == "outputs" else in_backward(calls):
            counts[call["micro_batch"], call["module"]] += 1
            _, squares = found.setdefault((call["module"], counts[call["micro_batch"], call["module"]]), (call, {}))
            for place, facts in enumerate(call[name]):
                size, square = squares.get(place, (0, 0.0))
                squares[place] = size + math.prod(facts["shape"]), square + facts.get("norm", 0.0) ** 2
    return found
