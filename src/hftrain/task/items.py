"""What a model's loss is a mean over: found by comparing the loss of two samples with the losses of each."""

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

_LEAST_GAP = 4e-3  # between two kinds' shares of a sample, so that a loss tells which it is
_NUM_TRIED = 24


@dataclass(frozen=True, slots=True)
class MeanOver:
    """What a loss is a mean over.

    Args:
        kind: One of `KINDS`; ``"sum"`` is a loss that adds up over samples.
        needs_count: The model's loss is such a mean only if it is given the number of items to divide by.
        divides: Whether the loss divides by a number of items that it is given.
        is_exact: Whether that reproduces the loss, rather than being the nearest.
        is_final: Whether it was found, rather than assumed until a batch tells.
        fits: The kinds that the batches tried so far cannot tell apart, where that is why it is not final.
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
        one: A batch of the first sample; the whole batch where it cannot be cut.
        other: A batch of the second; None where there is none.
        both: A batch of the two.
        twice: A batch of the first, repeated.
        is_ragged: Whether samples hold unequal numbers of items, so that it matters what the loss is a mean over.
    """

    one: Any
    other: Any = None
    both: Any = None
    twice: Any = None
    is_ragged: bool = True

    def parts(self) -> dict[str, Any]:
        """Return what it is made of, by name; the samples themselves are not copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def pick_pair(batch: Any, counts: Mapping[str, Sequence[int]] | None, *, even: bool) -> Pair | None:
    """Take out of a batch the two samples that tell the kinds apart best.

    Args:
        counts: How many items of each kind each sample holds; None where nothing is counted but samples.
        even: Whether a batch helps whose samples tell no two kinds apart.

    Returns:
        None where the batch tells nothing.
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
    """Return which two samples tell the kinds apart best, by how many items of each they hold, and whether they do.

    The first is the one that is tried alone.
    """
    # Of samples that hold equally many one is enough, and of many those that differ most.
    alike = {tuple(each): index for index, each in enumerate(counts) if any(each)}
    rows = sorted(each for each in alike if all(each)) or sorted(alike)
    if not rows:
        return 0, 0, False
    rows = rows if len(rows) <= 2 * _NUM_TRIED else rows[:_NUM_TRIED] + rows[-_NUM_TRIED:]
    best = max(combinations(rows, 2), key=lambda two: _separation(*two)[0], default=(rows[-1], rows[-1]))
    last, first = (alike[row] for row in sorted(best, key=lambda row: (len(set(row)), row)))
    return first, last, _separation(*best)[1] > _LEAST_GAP


def join_batches(batches: Sequence[Any]) -> Any:
    """Return the samples of several batches as one; None where their tensors do not fit, or something else differs."""
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
    """Return how well two samples tell all kinds apart, and how far apart the two are that differ most."""
    ratios = [count / max(count + with_it, 1) for count, with_it in zip(one, other, strict=True)]
    gaps = [abs(left - right) for left, right in combinations(ratios, 2)]
    # What is far enough apart to be told is not made up for by what is not.
    return sum(min(gap, 0.05) for gap in gaps) + 1e-3 * sum(gaps), max(gaps, default=0.0)


def counted(labels: torch.Tensor, ignored: Sequence[int]) -> torch.Tensor:
    """Return which labels count, as booleans; labels that are booleans are classes, and count."""
    if labels.dtype == torch.bool:
        return torch.ones_like(labels)
    counts = labels != ignored[0]
    for label in ignored[1:]:
        counts = counts & (labels != label)
    return counts


def take_samples(batch: Any, indices: list[int], size: int) -> Any:
    """Return a batch of some samples of a batch of `size`; None where something in it is not one entry per sample."""
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
    """Find what a loss is a mean over.

    Args:
        loss_of: Returns the loss of a batch, given a number of items to divide by or None.
        rule: What is assumed where these samples do not tell.
        kinds: What to consider, the likeliest first; of several that fit it is taken until a batch tells them apart.
        count: kind, batch -> its number of items.
        takes_count: Whether `loss_of` may make use of the number.
        is_rough: Whether it computes in 16 bits.
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
        # What is left of the loss as the number grows is not divided: a router's loss, say.
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
    """Return the likeliest of the kinds that fit, as found only if it is the only one."""
    is_final = len(fits) == 1
    return MeanOver(fits[0], divides=divides, is_final=is_final, fits=() if is_final else fits)


def _compare(
    one: float, other: float, both: float, twice: float, *, ratios: Mapping[str, float], epsilon: float
) -> MeanOver | None:
    """Find the first sample's part in the loss of both, and whose ratio of items that is."""
    scale, gap = max(abs(one), abs(other)), abs(one - other)
    if abs(twice - 2 * one) <= 1e-2 * scale and abs(both - one - other) <= 1e-2 * scale:
        return MeanOver(SUM) if scale else None
    noise = abs(twice - one)
    if noise > 1e-2 * scale:
        # The same sample twice has another loss: samples are compared with each other.
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
