"""Tell from pairs of runs which of two ways to train is better, how sure that is, and what the runs of a pair share."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, count, islice, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.seed import capture_rng
from hftrain.core.tree import map_tensors
from hftrain.extras.flight.observing import own_part
from hftrain.extras.flight.reading import Lines, first_parting, read_ledger

# In which share of all comparisons a true difference may ever be outside the interval, however often one looks.
LEVEL = 0.05
# An interval needs so many pairs; a comparison usually ends with so many; further ones are counted up to so many.
FIRST, USUAL, _MOST = 3, 12, 50
_PATHS = 2**19
# Float32 rounds by less than this part of a value.
_ROUNDED = 1e-7
FACTS = "compare.json"


def _spent(number: int) -> float:
    """Return which share of `LEVEL` is used up to a number of pairs: most of it up to `USUAL`, and never all."""
    return 0.9 * math.sqrt((number - 2) / (USUAL - 2)) if number <= USUAL else 1 - 0.1 * USUAL / number


def _simulate() -> Iterator[float]:
    """Yield, for 3, 4, ... pairs, how many standard errors a mean may be away from the truth.

    It is a group-sequential t-test with a spending function (Lan and DeMets, Biometrika 70, 1983). How far means stray
    does not depend on the deviation of normal differences, so that it can be simulated; the seed is fixed.
    """
    generator, num_out = torch.Generator().manual_seed(0), 0
    mean, squares = torch.zeros(_PATHS, dtype=torch.float64), torch.zeros(_PATHS, dtype=torch.float64)
    is_out = torch.zeros(_PATHS, dtype=torch.bool)
    for number in count(1):
        new = torch.randn(_PATHS, generator=generator, dtype=torch.float64)
        before, mean = mean, mean + (new - mean) / number
        squares += (new - before) * (new - mean)
        if number >= FIRST:
            errors = mean.abs() * math.sqrt(number * (number - 1)) / squares.sqrt()
            leaving = max(1, round(LEVEL * _spent(number) * _PATHS) - num_out)
            limit = float(errors.masked_fill(is_out, -1.0).topk(leaving).values[-1])
            is_out |= errors >= limit
            num_out += leaving
            yield limit


@cache
def _factors(most: int) -> list[float]:
    return list(islice(_simulate(), most - FIRST + 1))


@dataclass(frozen=True)
class Comparison:
    """What the numbers of runs in pairs tell about two ways to train, A and B.

    The claims hold together, after any number of pairs: each is read from one interval, and the true mean difference is
    outside of any of these intervals in at most 5% of all comparisons, if the differences are normal.

    Args:
        one: The numbers of A.
        two: Those of B, of the same pairs.
        is_higher_better: Whether a larger number is better.
        least: A difference that matters; 0 if every one does.
    """

    one: Sequence[float]
    two: Sequence[float]
    is_higher_better: bool
    least: float = 0.0

    @cached_property
    def gains(self) -> list[float]:
        """By how much B is better, of each pair."""
        sign = 1 if self.is_higher_better else -1
        return [sign * (two - one) for one, two in zip(self.one, self.two, strict=True)]

    @property
    def gain(self) -> float:
        """The mean of the gains."""
        return fmean(self.gains)

    @cached_property
    def deviation(self) -> float:
        """The standard deviation of the gains, at least half of the smallest step between them that was seen.

        Gains in steps, such as those of an accuracy of 50 samples, may be equal by chance. Infinite if none but 0 was.
        """
        if len(self.gains) < 2:
            return math.inf
        rounded = _ROUNDED * max(map(abs, chain(self.one, self.two)))
        steps = [high - low for low, high in pairwise(sorted([0.0, *self.gains])) if high - low > rounded]
        return max(stdev(self.gains), min(steps, default=math.inf) / 2)

    @property
    def independent_deviation(self) -> float:
        """The standard deviation that the difference of two runs of different seeds would have."""
        return math.hypot(stdev(self.one), stdev(self.two))

    def margin(self, number: int | None = None) -> float:
        """Return half of the interval's width with a number of pairs like these; None: as many as there are."""
        number = len(self.gains) if number is None else number
        if number < FIRST:
            return math.inf
        return _factors(max(_MOST, number))[number - FIRST] * self.deviation / math.sqrt(number)

    @property
    def verdict(self) -> str:
        """``"B is better"``, ``"A is better"``, ``"no difference"`` (as large as `least`), or ``"not known"``."""
        if not all(map(math.isfinite, self.gains)):
            return "not known"
        return self._verdict(self.margin())

    def _verdict(self, margin: float) -> str:
        if abs(self.gain) > margin:
            return "B is better" if self.gain > 0 else "A is better"
        return "no difference" if abs(self.gain) + margin < self.least else "not known"

    def more(self) -> int | None:
        """Return how many further pairs like these would decide; None if more than 50 pairs in all."""
        numbers = range(len(self.gains) + 1, _MOST + 1)
        known = (number for number in numbers if self._verdict(self.margin(number)) != "not known")
        return next((number - len(self.gains) for number in known), None)

    @property
    def status(self) -> int:
        """The exit status: 0 if B is known not to be worse (by more than `least`), 1 if it is, 3 if it is not known."""
        is_finite = [all(map(math.isfinite, each)) for each in (self.one, self.two)]
        if not all(is_finite):
            return 1 if is_finite[0] else 3
        lowest = self.gain - self.margin()
        return 0 if lowest > -self.least else 1 if self.verdict == "A is better" else 3


class Noting(TrainerCallback):
    """Note digests of the weights at the start, and of the random number generators at the start and the end."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note where the run starts."""
        sums = [float(own_part(each).float().sum()) for each in kwargs["model"].parameters()]
        self.facts = {"weights": _digest(sums), "random": [_digest(_generators())]}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note where the generators have come to."""
        self.facts["random"].append(_digest(_generators()))


def _generators() -> Any:
    return map_tensors(capture_rng(), torch.Tensor.tolist)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def read_facts(folder: str | Path) -> dict[str, Any]:
    """Return what a run that `hftrain compare` has trained noted; empty for other runs."""
    path = Path(folder, FACTS)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def shared(one: str | Path, two: str | Path) -> dict[str, str]:
    """Return what two runs have recorded of samples, weights and random numbers: whether they were the same."""
    facts, ledgers = [read_facts(each) for each in (one, two)], [read_ledger(each) for each in (one, two)]
    weights = [each.get("weights") for each in facts]
    if None in weights:  # equal first losses come from equal weights
        first = [[line.get("losses") for line in each.get(1, [])] for each in ledgers]
        weights = first if first[0] == first[1] != [] else [None]
    begin, end = zip(*(each.get("random", [None, None]) for each in facts), strict=True)
    random = "not the same from the start" if begin[0] != begin[1] else "not as many were drawn"
    return {
        "samples": _samples(*ledgers),
        "weights at the start": _is_same(weights),
        "random numbers": random if None not in begin and end[0] != end[1] else _is_same(end),
    }


def _is_same(values: Sequence[Any]) -> str:
    return "not known" if None in values else "the same" if values[0] == values[1] else "not the same"


def _samples(one: Lines, two: Lines) -> str:
    orders = [
        [sample for line in chain(*each.values()) for part in line.get("samples", []) for sample in part or [None]]
        for each in (one, two)
    ]
    if not all(orders) or any(None in each for each in orders):
        return "not known: they are in the flight log of a run, if its data has an order"
    parted = next((step for step in sorted({*one, *two}) if _of(one, step) != _of(two, step)), None)
    if parted is None:
        return "the same, in the same order"
    common = min(map(len, orders))
    if orders[0][:common] == orders[1][:common]:
        more = "" if len(orders[0]) == len(orders[1]) else f"; {' and '.join(f'{len(each):,}' for each in orders)}"
        return f"the same order, divided into other steps{more}"
    return f"not the same from step {parted}"


def _of(ledger: Lines, step: int) -> list[Any]:
    return [line.get("samples") for line in ledger.get(step, [])]


def is_same_to_the_bit(one: str | Path, two: str | Path) -> bool:
    """Return whether two runs have recorded the same steps with the same numbers; False without flight logs."""
    ledgers: Sequence[Mapping[int, Any]] = [read_ledger(each) for each in (one, two)]
    is_as_long = ledgers[0].keys() == ledgers[1].keys() != set()
    return is_as_long and first_parting(*ledgers)[0] is None
