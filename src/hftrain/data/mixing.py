"""Draw from several sets, with shares that are exact over a window and follow weights that may change."""

from __future__ import annotations

import copy
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from hftrain.core.errors import TaskError
from hftrain.data.samplers import ArraySampler, Span, shuffled
from hftrain.data.seeding import derive_seed
from hftrain.data.streams import set_dataset_epoch

_END = object()


class Cursor:
    """Where a pass over a mixture is, in plain data.

    Attributes:
        position, counts: The draws, and those of each set.
        start, owed, taken: The first draw of the window, what each set was then behind its share, its draws since.
        passes: How often each set has ended.
        is_open, is_closed: Whether a set has begun a pass, and whether it has ended for good.
    """

    def __init__(self, num_sets: int) -> None:
        self.position = self.start = 0
        self.counts, self.taken, self.passes = [0] * num_sets, [0] * num_sets, [0] * num_sets
        self.owed, self.is_open, self.is_closed = [0.0] * num_sets, [False] * num_sets, [False] * num_sets
        self.is_begun = self.is_over = False


def draws(
    mixture: Any, at: Cursor, take: Callable[[int], Any], *, epoch: int, seed: int, limit: float
) -> Iterator[Any]:
    """Yield what `take` returns for the set of each draw, unless that is `_END`; mutates the cursor."""
    common = getattr(mixture, "common", int)
    while not (at.is_over or all(at.is_closed)):
        place = common(at.start)
        shares, until = _shares_at(mixture, at, epoch=epoch, place=place)
        size, num_changes = int(min(mixture.window, max(1, limit - place))), None
        order = _dealt(shares, at, size, seed=derive_seed(seed, epoch, at.start))
        for number in order[at.position - at.start :]:
            place, num_changes = common(at.position), num_changes or len(mixture.history)
            at.is_over = place >= limit
            # A change ends the window, also one that was made meanwhile.
            if at.is_over or place >= until or len(mixture.history) != num_changes:
                break
            sample = take(number)
            if sample is _END:
                break
            at.position += 1
            at.counts[number] += 1
            at.taken[number] += 1
            yield sample
        due = [share * sum(at.taken) for share in shares]
        at.owed = [a + b - c for a, b, c in zip(at.owed, due, at.taken, strict=True)]
        at.start, at.taken = at.position, [0] * len(shares)


def _shares_at(mixture: Any, at: Cursor, *, epoch: int, place: int) -> tuple[list[float], float]:
    """Return the sets' shares of the next draws, and the draw at which the weights change."""
    history = mixture.history
    found = bisect_right(history, (epoch, place), key=lambda change: (change[0], change[1]))
    until = history[found][1] if found < len(history) and history[found][0] == epoch else math.inf
    weights = [weight * (not closed) for weight, closed in zip(history[found - 1][2], at.is_closed, strict=True)]
    if mixture.mode == "sequential" or not any(weights):
        first = at.is_closed.index(False)
        return [float(number == first) for number in range(len(weights))], until
    return [weight / sum(weights) for weight in weights], until


def _dealt(shares: Sequence[float], at: Cursor, size: int, *, seed: int) -> list[int]:
    """Return the sets of the draws of a window, in random order."""
    due = [share * size + owed * (share > 0) for share, owed in zip(shares, at.owed, strict=True)]
    given = [max(0, math.floor(each + 1e-9)) for each in due]
    while rest := size - sum(given):
        able = [number for number, share in enumerate(shares) if share and (rest > 0 or given[number])]
        given[max(able, key=lambda i: (due[i] - given[i]) * rest)] += 1 if rest > 0 else -1
    order = [number for number, times in enumerate(given) for _ in range(times)]
    random.Random(seed).shuffle(order)
    return order


class MixtureSampler(ArraySampler):
    """Draw (set, sample) pairs of map-style sets; begins anywhere after drawing what is before, in seconds a million.

    Attributes:
        epoch, position: The pass, and the first draw that was not taken yet.
        drawn: The sets of draws that the mixture has not counted yet.
    """

    def __init__(self, mixture: Any, *, seed: int, shuffle: bool = True) -> None:
        self.mixture, self.seed, self.shuffle = mixture, seed, shuffle
        self.epoch = self.position = 0
        self.drawn: deque[int] = deque()
        self._orders: dict[int, tuple[int, Any]] = {}

    def set_epoch(self, epoch: int) -> None:
        """Set the pass that the next iteration draws; what others have drawn counts as trained on."""
        while self.drawn:
            self.mixture.trained[self.drawn.popleft()] += 1
        self.epoch, self.position = epoch, 0

    def __len__(self) -> int:
        return len(self.mixture)

    def pick(self, *spans: Span) -> Iterator[Any]:
        """Iterate some positions of the order."""
        mixture, epoch = self.mixture, self.epoch
        at, is_once = Cursor(len(mixture.lengths)), mixture.mode in ("max_size", "sequential")

        def take(number: int) -> Any:
            length, count = mixture.lengths[number], at.counts[number]
            at.is_closed[number] = is_once and count == length
            if at.is_closed[number]:
                return _END
            return number, *((epoch, count) if is_once else divmod(mixture.trained[number] + count, length))

        found = draws(mixture, at, take, epoch=epoch, seed=self.seed, limit=len(self))
        for start, stop in spans:
            while at.position < (len(self) if stop is None else stop) and (place := next(found, None)):
                self.position = at.position
                self.drawn.append(place[0])
                if at.position > start:
                    yield place[0], self._index(*place)

    def _index(self, number: int, times: int, place: int) -> int:
        if not self.shuffle:
            return place
        if self._orders.get(number, (None,))[0] != times:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, number, times))
            self._orders[number] = times, shuffled(self.mixture.lengths[number], generator)
        return int(self._orders[number][1][place])


class MixedStream(IterableDataset[Any]):
    """Draw from streams, whose lengths are known when they end; a subclass sets the attributes."""

    datasets: list[Any]
    history: Any
    mode: str
    window: int
    epoch_size: int | None
    seed: int
    epoch = 0
    # Samples in a row that the loader takes from one worker.
    turn = 1
    _cursor: Cursor | None = None
    _is_loaded = False

    @property
    def cursor(self) -> Cursor:
        """Where the latest iteration is."""
        self._cursor = self._cursor or Cursor(len(self.datasets))
        return self._cursor

    def set_epoch(self, epoch: int) -> None:
        """Set the pass that the next iteration reads."""
        self.epoch = epoch
        for number, dataset in enumerate(self.datasets):
            set_dataset_epoch(dataset, epoch=epoch, seed=self.seed + number)

    def __iter__(self) -> Iterator[Any]:
        self._cursor, self._is_loaded = self.cursor if self._is_loaded else Cursor(len(self.datasets)), False
        self._cursor.is_begun = True
        iterators = {number: iter(each) for number, each in enumerate(self.datasets) if self._cursor.is_open[number]}
        limit = math.inf if self.epoch_size is None else self.epoch_size
        return draws(
            self, self._cursor, lambda n: self._next(n, iterators), epoch=self.epoch, seed=self.seed, limit=limit
        )

    def _next(self, number: int, iterators: dict[int, Iterator[Any]]) -> Any:
        """Return the next sample of a stream, from its start again if the mode says so; `_END` if it has ended."""
        at = self.cursor
        for _ in range(2):
            if number not in iterators:
                iterators[number], at.is_open[number] = self._open(number), True
            sample = next(iterators[number], _END)
            if sample is not _END:
                return sample
            del iterators[number]
            at.is_open[number] = False
            at.passes[number] += 1
            # A set that no change gives a weight is not waited for.
            weighted = map(any, zip(*(change[2] for change in self.history), strict=True))
            is_done = all(times or not is_read for times, is_read in zip(at.passes, weighted, strict=True))
            at.is_over = self.mode == "min_size" or (self.mode == "max_size_cycle" and is_done)
            at.is_closed[number] = self.mode in ("max_size", "sequential")
            if at.is_over or at.is_closed[number]:
                return _END
        raise TaskError(
            f"Cannot read set {number} of a mixture again.", "It gave no sample.", "Check how it was made or filtered."
        )

    def _open(self, number: int) -> Iterator[Any]:
        return iter(self.datasets[number])

    def common(self, place: int) -> int:
        """Return the place of a draw among those of all workers, which take turns."""
        worker: Any = get_worker_info()
        if worker is None:
            return place
        return int(place // self.turn * worker.num_workers + worker.id) * self.turn + place % self.turn


class StatefulMixedStream(MixedStream):
    """The same of streams that all save their positions."""

    _first: list[Any] | None = None

    def _open(self, number: int) -> Iterator[Any]:
        self.datasets[number].load_state_dict(copy.deepcopy(self._starts()[number]))
        return super()._open(number)

    def _starts(self) -> list[Any]:
        """Return the states of the streams before anything was read."""
        self._first = self._first or [copy.deepcopy(each.state_dict()) for each in self.datasets]
        return self._first

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the pass, and the states of the streams that it has begun."""
        self._starts()
        at = self.cursor
        states = [each.state_dict() if begun else None for each, begun in zip(self.datasets, at.is_open, strict=True)]
        return copy.deepcopy({"cursor": vars(at), "streams": states})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, for the next iteration."""
        self._starts()
        vars(self.cursor).update(copy.deepcopy(state["cursor"]))
        self._is_loaded = self.cursor.is_begun
        for dataset, found in zip(self.datasets, copy.deepcopy(state["streams"]), strict=True):
            if found is not None:
                dataset.load_state_dict(found)
