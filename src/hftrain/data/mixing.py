"""Draw from several sets, with shares that are exact over a window and follow weights that may change."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hftrain.core.errors import ConfigError
from hftrain.core.lengths import read_length
from hftrain.data.samplers import ArraySampler, Span, shuffled
from hftrain.data.seeding import derive_seed

# Draws that are dealt at once, at most.
_MAX_CHUNK = 65_536


def deal_sets(shares: Sequence[float], *, window: int, seed: int, total: float, left: Any = None) -> Iterator[Any]:
    """Yield the sets of `total` draws, in arrays of whole windows, or until nothing is `left` of any set.

    A set with the share 0.2 is due at 2.5, 7.5, 12.5 and so on, so that each has its share up to about one draw at any
    time; then every window is shuffled. Sets without a share follow at the end, in order.

    Example:
        >>> [numbers.tolist() for numbers in deal_sets([0.0, 1.0], window=2, seed=0, total=9, left=[1, 3])]
        [[1, 1], [0, 1]]
    """
    num, size, random = len(shares), window, np.random.default_rng(seed)
    gaps, counts = [1 / share if share else math.inf for share in shares], np.zeros(num, np.int64)
    while total > 0:
        size = int(min(size, total))
        max_counts = np.ceil(np.multiply(shares, size)).astype(int) + num + 2 if left is None else left - counts
        due_times = [(np.arange(min(max_counts[i], size)) + counts[i] + 0.5) * gaps[i] for i in range(num)]
        order = np.concatenate(due_times).argsort(kind="stable")[:size]
        numbers = np.repeat(np.arange(num, dtype=np.int16), [len(times) for times in due_times])[order]
        if not len(numbers):
            return
        counts, total = counts + np.bincount(numbers, minlength=num), total - size
        yield numbers[(np.arange(len(numbers)) // window + random.random(len(numbers))).argsort()]
        size = min(2 * size, max(_MAX_CHUNK // window, 1) * window)


def shares_at(mixture: Any, epoch: int, place: int) -> tuple[list[float], float, float]:
    """Return the shares of a draw of a pass, and the draws of the pass from which and up to which they hold."""
    if mixture.is_scheduled and mixture.planned not in (None, epoch):
        raise ConfigError(
            "Cannot change weights by the update: which draws an update takes is unknown.",
            "A Trainer must read the mixture itself, by its own loader, without stream workers that outlive a pass.",
            "Pack the sets, not the mixture; leave out dataloader_persistent_workers for streams, and overfit_batches.",
        )
    history = mixture.history
    change_index = bisect_right(history, [epoch, place], key=lambda change: change[:2])
    end = history[change_index][1] if change_index < len(history) and history[change_index][0] == epoch else math.inf
    change_epoch, start, shares = history[change_index - 1]
    return shares, start if change_epoch == epoch else 0, end


def update_of(when: Any, config: Any) -> int:
    """Return the update at which a scheduled weight begins."""
    length, per_pass = read_length(when), -(-(config.num_batches or 0) // config.accumulation)
    units = {"ba": 1, "dur": config.max_steps, "ep": per_pass}
    updates: float = when if isinstance(when, int) else length.value * units.get(length.unit, 0) if length else 0
    if not updates and when != 0:
        raise ConfigError(
            f"Cannot change a weight at {when!r}.",
            "It is not a number of updates, or a pass has an unknown length.",
            "Write it like 500, '500ba', '2ep' or '0.8dur'.",
        )
    return round(updates)


class MixtureSampler(ArraySampler):
    """Draw (set, sample) pairs of map-style sets; begins anywhere.

    Attributes:
        epoch, position: The pass, and the first draw that was not taken yet.
        num_dealt: The draws whose sets are decided; a change of the weights lowers it.
    """

    def __init__(self, mixture: Any, *, seed: int, shuffle: bool = True) -> None:
        self.mixture, self.seed, self.shuffle = mixture, seed, shuffle
        self._orders: dict[int, tuple[int, Any]] = {}
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        # The sets of the pass's draws, two bytes each, and how often each is in the first of them.
        self._sets, self.epoch, self.position = np.empty(len(self), np.int16), epoch, 0
        self._known_counts: tuple[int, Any] = (0, 0)
        self.num_dealt = 0
        self._windows: Iterator[Any] = iter(())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "num_dealt": 0, "_windows": None}

    def set_epoch(self, epoch: int) -> None:
        """Set the pass that the next iteration draws; without a Trainer, what was drawn counts as trained on."""
        if self.mixture.progress is None:
            self.mixture.trained[0] = np.add(self.mixture.trained[0], self.counts(self.position)).tolist()
        self._begin(epoch)

    def __len__(self) -> int:
        return len(self.mixture)

    def counts(self, place: int) -> Any:
        """Return how often each set is drawn before a place in the pass."""
        self._deal(place)
        start, counts = self._known_counts if self._known_counts[0] <= place else (0, 0)
        self._known_counts = place, counts + np.bincount(self._sets[start:place], minlength=len(self.mixture.datasets))
        return self._known_counts[1]

    def _deal(self, place: int) -> None:
        mixture, length = self.mixture, len(self)
        while self.num_dealt < min(place, length):
            shares, start, end = shares_at(mixture, self.epoch, self.num_dealt)
            if start == self.num_dealt:
                num_left = mixture.lengths - self.counts(self.num_dealt) if mixture.is_once else None
                seed = derive_seed(self.seed, self.epoch, self.num_dealt)
                self._windows = deal_sets(shares, window=mixture.window, seed=seed, total=length - start, left=num_left)
            numbers = next(self._windows)[: int(min(end, length)) - self.num_dealt]
            self._sets[self.num_dealt : self.num_dealt + len(numbers)] = numbers
            self.num_dealt += len(numbers)

    def pick(self, *spans: Span) -> Iterator[Any]:
        past_counts = [0 if self.mixture.is_once or not self.epoch else number for number in self.mixture.trained[0]]
        for start, stop in spans:
            counts = [past + int(current) for past, current in zip(past_counts, self.counts(start), strict=True)]
            for place in range(start, len(self) if stop is None else min(stop, len(self))):
                if place >= self.num_dealt:
                    self._deal(place + 1)
                number, self.position = int(self._sets[place]), place + 1
                counts[number] += 1
                yield number, self._index(number, counts[number] - 1)

    def _index(self, number: int, count: int) -> int:
        length = self.mixture.lengths[number]
        num_passes, place = (self.epoch, count) if self.mixture.is_once else divmod(count, length)
        if not self.shuffle:
            return place
        if self._orders.get(number, (None,))[0] != num_passes:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, number, num_passes))
            self._orders[number] = num_passes, shuffled(length, generator).numpy()
        return int(self._orders[number][1][place])
