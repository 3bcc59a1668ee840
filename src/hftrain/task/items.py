"""Detect what a model's loss averages over, by comparing the loss of two samples together with their single losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any

import torch

from hftrain.core.tree import batch_size_of

LABELS, SHIFTED, SAMPLES, SUM = "labels", "shifted_labels", "samples", "sum"
KINDS = (LABELS, SHIFTED, SAMPLES, SUM)

_LEAST_GAP = 4e-3  # smallest difference between two kinds' shares of a sample that a loss can show
_NUM_TRIED = 24


@dataclass(frozen=True, slots=True)
class MeanOver:
    """The kind of item that a loss averages over.

    Args:
        kind: One of `KINDS`; ``"sum"`` is a loss that adds up over samples.
        needs_count: Whether the model's loss is such a mean only if it is given the number of items to divide by.
        divides: Whether the loss divides by the number of items that it is given.
        is_exact: Whether `kind` reproduces the loss; otherwise it is the nearest one.
        is_final: Whether `kind` was detected; otherwise it is assumed until a batch shows it.
        fits: The kinds that the batches tried so far cannot distinguish, if that is why `is_final` is False.
    """

    kind: str
    needs_count: bool = False
    divides: bool = False
    is_exact: bool = True
    is_final: bool = True
    fits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """Two samples of a batch with unequal numbers of items.

    Args:
        one: A batch of the first sample; the whole batch if it cannot be split.
        other: A batch of the second sample; None without one.
        both: A batch of the two samples.
        twice: A batch that holds the first sample twice.
        is_ragged: Whether samples hold unequal numbers of items, so that the kind of mean matters.
    """

    one: Any
    other: Any = None
    both: Any = None
    twice: Any = None
    is_ragged: bool = True

    def parts(self) -> dict[str, Any]:
        """Return the fields by name; the samples are not copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def pick_pair(batch: Any, counts: Mapping[str, Sequence[int]] | None, *, even: bool) -> Pair | None:
    """Take the two samples out of a batch that distinguish the kinds best.

    Args:
        counts: The number of items of each kind in each sample; None if only samples can be counted.
        even: Whether to accept a batch whose samples distinguish no two kinds.

    Returns:
        None if the batch is of no use.
    """
    size = (batch_size_of(batch) or 0) if counts is None else len(next(iter(counts.values()), ()))
    first, last = 0, size - 1
    is_telling = counts is None and size > 1
    if counts is not None:
        first, last, is_telling = pick_rows(list(zip(*counts.values(), strict=True)))
    if not (is_telling or even) or not size:
        return None
    is_ragged = counts is not None and is_telling
    parts = [take_samples(batch, indices, size) for indices in ([first], [last], [first, last], [first, first])]
    if any(part is None for part in parts):
        return Pair(batch, is_ragged=is_ragged) if even or is_ragged else None
    one, other, both, twice = parts
    return Pair(one, other, both, twice, is_ragged=is_ragged) if is_telling else Pair(one, is_ragged=False)


def pick_rows(counts: Sequence[Sequence[int]]) -> tuple[int, int, bool]:
    """Return the indices of the two samples whose item counts distinguish the kinds best, and whether they do.

    The first sample is the one that is tried alone.
    """
    # One sample per distinct row of counts is enough; of many rows, the extreme ones are tried.
    alike = {tuple(each): index for index, each in enumerate(counts) if any(each)}
    rows = sorted(each for each in alike if all(each)) or sorted(alike)
    if not rows:
        return 0, 0, False
    rows = rows if len(rows) <= 2 * _NUM_TRIED else rows[:_NUM_TRIED] + rows[-_NUM_TRIED:]
    best = max(combinations(rows, 2), key=lambda two: _separation(*two)[0], default=(rows[-1], rows[-1]))
    last, first = (alike[row] for row in sorted(best, key=lambda row: (len(set(row)), row)))
    return first, last, _separation(*best)[1] > _LEAST_GAP


def join_batches(batches: Sequence[Any]) -> Any:
    """Return the samples of several batches as one batch; None if shapes of samples or other values differ."""
    first = batches[0]
    if not all(isinstance(batch, Mapping) and batch.keys() == first.keys() for batch in batches):
        return None
    joined = {}
    for name, value in first.items():
        others = [batch[name] for batch in batches]
        if isinstance(value, torch.Tensor) and value.dim():
            if any(not isinstance(each, torch.Tensor) or each.shape[1:] != value.shape[1:] for each in others):
                return None
            joined[name] = torch.cat(others)
        elif not all(each is value for each in others):
            return None
        else:
            joined[name] = value
    return joined


def _separation(one: Sequence[int], other: Sequence[int]) -> tuple[float, float]:
    """Return how well two samples distinguish all kinds, and the largest difference between two kinds."""
    ratios = [count / max(count + with_it, 1) for count, with_it in zip(one, other, strict=True)]
    gaps = [abs(left - right) for left, right in combinations(ratios, 2)]
    # Gaps are capped: one wide gap must not compensate for a gap too narrow to detect.
    return sum(min(gap, 0.05) for gap in gaps) + 1e-3 * sum(gaps), max(gaps, default=0.0)


def counted(labels: torch.Tensor, ignored: Sequence[int]) -> torch.Tensor:
    """Return a mask of the labels that count; boolean labels are classes and all count."""
    if labels.dtype == torch.bool:
        return torch.ones_like(labels)
    counts = labels != ignored[0]
    for label in ignored[1:]:
        counts = counts & (labels != label)
    return counts


def take_samples(batch: Any, indices: list[int], size: int) -> Any:
    """Return a batch of some samples of a batch of `size`; None if a value does not have one entry per sample."""
    if isinstance(batch, torch.Tensor):
        return batch if not batch.dim() else batch[indices] if len(batch) == size else None
    if isinstance(batch, Mapping):
        items = {name: (take_samples(value, indices, size), value) for name, value in batch.items()}
        if any(part is None and value is not None for part, value in items.values()):
            return None
        return {name: part for name, (part, _) in items.items()}
    if isinstance(batch, (list, tuple)):
        return [batch[index] for index in indices] if len(batch) == size else None
    return batch


def find_mean(
    pair: Pair,
    loss_of: Callable[[Any, int | None], float],
    *,
    rule: str,
    kinds: Sequence[str],
    count: Callable[[str, Any], int],
    takes_count: bool,
    is_rough: bool,
) -> MeanOver:
    """Detect what a loss averages over.

    Args:
        loss_of: Returns the loss of a batch, given a number of items to divide by or None.
        rule: The kind to assume if these samples do not show it.
        kinds: Candidates, the likeliest first. If several fit, the first is assumed until a batch distinguishes them.
        count: kind, batch -> the batch's number of items of that kind.
        takes_count: Whether `loss_of` may use the number.
        is_rough: Whether the loss is computed in 16 bits.
    """
    counts = {kind: count(kind, pair.one) for kind in kinds}
    assumed, divided = MeanOver(rule, is_final=False), False
    if takes_count:
        number = max(counts[kinds[0]], 1)
        with_count, with_twice = loss_of(pair.one, number), loss_of(pair.one, 2 * number)
        total = 2 * number * (with_count - with_twice)
        divided = math.isfinite(total) and not _is_close(with_count, with_twice, 1e-3)
    needs_count = MeanOver(rule, needs_count=True, divides=True)
    try:
        one, again = loss_of(pair.one, None), loss_of(pair.one, None)
        rest = [loss_of(batch, None) for batch in (pair.other, pair.both, pair.twice) if batch is not None]
    except Exception:
        if not divided:
            raise
        return needs_count
    if not math.isfinite(one):
        return needs_count if divided else assumed
    if not _is_close(one, again, 1e-3 if is_rough else 1e-6):
        if divided:
            return needs_count
        raise ArithmeticError("the same samples gave two different losses: the model draws random numbers")
    if divided:
        # The limit of the loss for a large number is its undivided part, such as a router's loss.
        items = total / ((one - (2 * with_twice - with_count)) or math.nan)
        return _nearest_count(items, counts, is_rough=is_rough) or needs_count
    if not rest or not all(map(math.isfinite, rest)):
        return assumed
    ratios = {kind: counts[kind] / max(counts[kind] + count(kind, pair.other), 1) for kind in kinds}
    return _compare(one, *rest, ratios=ratios, epsilon=1e-4 if is_rough else 1e-6) or assumed


def _nearest_count(items: float, counts: Mapping[str, int], *, is_rough: bool) -> MeanOver | None:
    if not math.isfinite(items):
        return None
    errors = {kind: abs(items - number) for kind, number in counts.items()}
    tolerance = max(0.25, (5e-3 if is_rough else 1e-4) * items)
    fits = tuple(kind for kind, error in errors.items() if error <= tolerance)
    return _one_of(fits, divides=True) if fits else None


def _one_of(fits: tuple[str, ...], *, divides: bool = False) -> MeanOver:
    """Return the likeliest of the kinds that fit, as final only if it is the only one."""
    is_final = len(fits) == 1
    return MeanOver(fits[0], divides=divides, is_final=is_final, fits=() if is_final else fits)


def _compare(
    one: float, other: float, both: float, twice: float, *, ratios: Mapping[str, float], epsilon: float
) -> MeanOver | None:
    """Compute the first sample's weight in the loss of both, and return the kind whose item ratio matches it."""
    scale, gap = max(abs(one), abs(other)), abs(one - other)
    if abs(twice - 2 * one) <= 1e-2 * scale and abs(both - one - other) <= 1e-2 * scale:
        return MeanOver(SUM) if scale else None
    noise = abs(twice - one)
    if noise > 1e-2 * scale:
        # Repeating a sample changes the loss, so the loss compares samples with each other (contrastive).
        return MeanOver(SAMPLES, is_exact=False)
    noise = max(noise, epsilon * scale)
    if gap < 20 * noise:
        return None
    part, doubt = (both - other) / (one - other), max(4 * noise / gap, 1e-3)
    errors = {kind: abs(part - ratio) for kind, ratio in ratios.items()}
    fits = tuple(kind for kind, error in errors.items() if error <= doubt)
    if fits:
        return _one_of(fits)
    best = min(errors, key=errors.__getitem__)
    others = [abs(ratio - ratios[best]) for ratio in ratios.values() if abs(ratio - ratios[best]) > 1e-9]
    if errors[best] <= min(others, default=0.0) / 4:
        return _one_of(tuple(kind for kind in ratios if abs(ratios[kind] - ratios[best]) <= 1e-9))
    return MeanOver(best if -doubt <= part <= 1 + doubt else SAMPLES, is_exact=False)


def _is_close(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12)
