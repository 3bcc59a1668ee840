"""Tell from pairs of numbers which of two ways to train is better, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, pairwise
from statistics import fmean, stdev
from typing import Any

import torch

# In which share of all comparisons a true difference may ever be outside the interval, however often one looks.
LEVEL = 0.05
# An interval needs so many pairs; a comparison usually ends with so many; further ones are counted up to so many.
FIRST, USUAL, _MOST = 3, 12, 50
_PATHS = 2**19
# Float32 rounds by less than this part of a value.
_ROUNDED = 1e-7


def _spent(number: int) -> float:
    """Return which share of `LEVEL` is used up to a number of pairs: most of it up to `USUAL`, and never all."""
    return 0.9 * math.sqrt((number - 2) / (USUAL - 2)) if number <= USUAL else 1 - 0.1 * USUAL / number


@cache
def _factors(most: int) -> list[float]:
    """Return, for 3, 4, ... pairs, how many standard errors a mean may be away from the truth.

    It is a group-sequential t-test with a spending function (Lan and DeMets, Biometrika 70, 1983). How far means stray
    does not depend on the deviation of normal differences, so that it can be simulated; the seed is fixed.
    """
    generator, num_out, factors = torch.Generator().manual_seed(0), 0, list[float]()
    mean, squares = torch.zeros(_PATHS, dtype=torch.float64), torch.zeros(_PATHS, dtype=torch.float64)
    is_out = torch.zeros(_PATHS, dtype=torch.bool)
    for number in range(1, most + 1):
        new = torch.randn(_PATHS, generator=generator, dtype=torch.float64)
        before, mean = mean, mean + (new - mean) / number
        squares += (new - before) * (new - mean)
        if number >= FIRST:
            errors = mean.abs() * math.sqrt(number * (number - 1)) / squares.sqrt()
            leaving = max(1, round(LEVEL * _spent(number) * _PATHS) - num_out)
            factors.append(float(errors.masked_fill(is_out, -1.0).topk(leaving).values[-1]))
            is_out |= errors >= factors[-1]
            num_out += leaving
    return factors


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

        Gains in steps, such as those of an accuracy of 50 samples, may be equal by chance. Infinite if all are 0, or
        if it is not known.
        """
        if len(self.gains) < 2 or not self.is_finite:
            return math.inf
        rounded = _ROUNDED * max(map(abs, chain(self.one, self.two)))
        steps = [high - low for low, high in pairwise(sorted([0.0, *self.gains])) if high - low > rounded]
        return max(stdev(self.gains), min(steps, default=math.inf) / 2)

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        return all(map(math.isfinite, self.gains))

    def margin(self, number: int | None = None) -> float:
        """Return half of the interval's width with a number of pairs like these; None: as many as there are."""
        number = len(self.gains) if number is None else number
        if number < FIRST:
            return math.inf
        return _factors(max(_MOST, number))[number - FIRST] * self.deviation / math.sqrt(number)

    def verdict_at(self, margin: float) -> str:
        """Return the verdict that a margin allows.

        ``"B is better"``, ``"A is better"``, ``"no difference"`` (as large as `least`) or ``"not known"``; if one has
        numbers that are not finite, ``"B diverged"``, ``"A diverged"`` or ``"A and B diverged"``.
        """
        if not self.is_finite:
            sides = zip("AB", (self.one, self.two), strict=True)
            return f"{' and '.join(side for side, values in sides if not all(map(math.isfinite, values)))} diverged"
        if abs(self.gain) > margin:
            return "B is better" if self.gain > 0 else "A is better"
        return "no difference" if abs(self.gain) + margin < self.least else "not known"

    @property
    def verdict(self) -> str:
        """That of all pairs; see `verdict_at`."""
        return self.verdict_at(self.margin())

    @property
    def more(self) -> int | None:
        """How many further pairs like these would decide; None if more than 50 pairs in all, or if it is decided."""
        known, numbers = len(self.gains), range(len(self.gains), _MOST + 1)
        if known < FIRST:
            return FIRST - known if self.is_finite else None
        enough = (each - known for each in numbers if self.verdict_at(self.margin(each)) != "not known")
        return next(enough, None) or None

    @property
    def status(self) -> int:
        """The exit status: 0 if B is known not to be worse (by more than `least`), 1 if it is, 3 if it is not known."""
        if not self.is_finite:
            return 1 if self.verdict == "B diverged" else 3
        return 0 if self.gain - self.margin() > -self.least else 1 if self.verdict == "A is better" else 3

    def facts(self) -> dict[str, Any]:
        """Return what is known as plain values; None for what is not."""
        has_noise = math.isfinite(self.deviation)
        return {
            "verdict": self.verdict, "better": "higher" if self.is_higher_better else "lower",
            "gain": self.gain, "margin": self.margin() if math.isfinite(self.margin()) else None,
            "min_difference": self.least, "more_pairs": self.more, "deviation": self.deviation if has_noise else None,
            "independent_deviation": math.hypot(stdev(self.one), stdev(self.two)) if has_noise else None,
        }  # fmt: skip
