"""The order and the share in which a rank reads a map-style dataset."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from hftrain.core.errors import ConfigError
from hftrain.data.datasets import has_length
from hftrain.data.seeding import (
    BatchWrapper,
    SeededBatches,
    derive_seed,
    new_generator,
    with_own_numbers,
    with_own_numbers_later,
)

# Packages whose samplers draw from a generator of their own, which has a seed.
_OWN_GENERATORS = frozenset({"accelerate", "builtins", "hftrain", "torch"})
# The first item and the end (exclusive); None for the sampler's end.
Span = tuple[int, int | None]

_EVERYTHING: Span = (0, None)
# How many entries of an order are converted to Python integers at once.
_CHUNK_SIZE = 4096


class ArraySampler(Sampler[int]):
    """Read samples in the order of an array, 4 bytes for each sample, drawn at the first sample of a pass.

    Subclasses define `draw`. A list of Python integers would take ten times the memory.
    """

    def draw(self) -> Any:
        """Return the order of the next pass, a tensor or a NumPy array."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        return self.pick(_EVERYTHING)

    def pick(self, *spans: Span) -> Iterator[int]:
        """Iterate some positions of the order."""
        return chain.from_iterable(self._chunks(spans))

    def _chunks(self, spans: Iterable[Span]) -> Iterator[list[int]]:
        order = self.draw()
        for start, stop in spans:
            part = order[start:stop]
            for place in range(0, len(part), _CHUNK_SIZE):
                yield part[place : place + _CHUNK_SIZE].tolist()


def shuffled(num: int, generator: torch.Generator | None) -> torch.Tensor:
    """Return `torch.randperm(num)`, in int32 if possible; the order does not depend on the type."""
    dtype = torch.int32 if num < 2**31 else torch.int64
    return torch.randperm(num, generator=generator, device="cpu", dtype=dtype)


class EpochShuffleSampler(ArraySampler):
    """Reshuffle in each epoch; the order depends only on the seed and the epoch.

    The order of epoch e is `torch.randperm(n)` from a generator seeded with `seed + e`, the order in which the
    Hugging Face Trainer reads the same dataset with the same data seed.
    """

    def __init__(self, data_source: Sized, *, seed: int) -> None:
        self.data_source = data_source
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration yields."""
        self.epoch = epoch

    def draw(self) -> torch.Tensor:
        return shuffled(len(self), torch.Generator().manual_seed(self.seed + self.epoch))

    def __len__(self) -> int:
        return len(self.data_source)


class GlobalShuffleSampler(ArraySampler, RandomSampler):
    """Shuffle with torch's global generator in its current state (`use_seedable_sampler=False`).

    The order cannot be reproduced after a resume in the middle of an epoch.
    """

    def draw(self) -> torch.Tensor:
        """Return the order that torch's `RandomSampler` would give."""
        seed = int(torch.empty((), dtype=torch.int64).random_())
        return shuffled(len(self), torch.Generator().manual_seed(seed))


class ContiguousShard(Sampler[Any]):
    """Give one rank its contiguous share of another sampler, without padding or repetition.

    With n samples and W ranks, rank r gets the samples from `n * r // W` to `n * (r + 1) // W`, so that the shares,
    concatenated, restore the order. A share may be empty.

    Args:
        sampler: Yields indices, or batches of them. It must have a length.
        unit: How many samples stay together; an incomplete last unit is left out.

    Example:
        >>> [list(ContiguousShard(range(5), rank=rank, world_size=2)) for rank in (0, 1)]
        [[0, 1], [2, 3, 4]]
    """

    def __init__(self, sampler: Any, *, rank: int, world_size: int, unit: int = 1) -> None:
        if not has_length(sampler):
            raise ConfigError(
                f"Cannot split {type(sampler).__name__} among {world_size} processes.",
                "Without a length the shares of the ranks are undefined.",
                "Give it a __len__.",
            )
        self.sampler = sampler
        self._rank = rank
        self._world_size = world_size
        self._unit = unit

    def _bounds(self) -> tuple[int, int]:
        units = len(self.sampler) // self._unit
        first, last = (units * rank // self._world_size for rank in (self._rank, self._rank + 1))
        return first * self._unit, last * self._unit

    def __iter__(self) -> Iterator[Any]:
        return pick(self.sampler, self._bounds()) or islice(self.sampler, *self._bounds())

    def __len__(self) -> int:
        start, stop = self._bounds()
        return stop - start


class OwnOrder(BatchWrapper):
    """A user's order, drawn from numbers that samples and dropout do not draw from.

    The global generators may differ between ranks, and a resume repeats the order without the steps between.

    Args:
        seed: With the pass, where the numbers start, for ranks that cut the order into shares. None: the first item is
            drawn from the global generators, as in a plain loop, and the rest from a copy of them.
    """

    passes_batches_on = True

    def __init__(self, batch_sampler: Any, *, seed: int | None) -> None:
        super().__init__(batch_sampler)
        self._seed = seed

    def begin(self, start: int) -> None:
        """Return None: the items before must be drawn, too."""

    def __iter__(self) -> Iterator[Any]:
        if self._seed is None:
            return with_own_numbers_later(iter(self.batch_sampler))
        return with_own_numbers(lambda: iter(self.batch_sampler), seed=derive_seed(self._seed, self._epoch))


def own_order(sampler: Any, *, seed: int | None = None) -> Any:
    """Return the sampler, or an `OwnOrder` if a user's class is in it and no `OwnOrder` yet."""
    parts = (sampler, *samplers_of(sampler))
    is_users = any(type(part).__module__.partition(".")[0] not in _OWN_GENERATORS for part in parts)
    is_wrapped = any(isinstance(part, OwnOrder) for part in parts)
    return OwnOrder(sampler, seed=seed) if is_users and not is_wrapped else sampler


class RankBatches(BatchWrapper):
    """Give one rank its batch of each round of training batches, one for every rank.

    An incomplete last round is left out if the batches must be full, else filled up from the first round, or
    with `even_batches=False` distributed unchanged. Batches of unknown size are repeated whole. Smaller batches in
    earlier rounds are distributed unchanged.

    Its attributes have the names of accelerate's `BatchSamplerShard`, which yields the same batches, except that it
    leaves out earlier rounds whose last batch is small.

    Example:
        >>> batches = [[0, 1], [2, 3], [4, 5]]
        >>> [list(RankBatches(batches, num_processes=2, process_index=rank)) for rank in (0, 1)]
        [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]
    """

    def __init__(
        self,
        batch_sampler: Any,
        *,
        num_processes: int,
        process_index: int,
        even_batches: bool = True,
    ) -> None:
        super().__init__(batch_sampler)
        self.num_processes = num_processes
        self.process_index = process_index
        self.even_batches = even_batches

    def __iter__(self) -> Iterator[Any]:
        return self._shares(self.batch_sampler)

    def begin(self, start: int) -> Iterator[Any] | None:
        """Iterate from a given round; None if the rounds before it must be drawn too."""
        unit = self.num_processes
        # Kept because the last round may be filled up from the first one.
        batches = pick(self.batch_sampler, (0, unit), (max(start, 1) * unit, None))
        return None if batches is None else islice(self._shares(batches), min(start, 1), None)

    def _shares(self, batches: Iterable[Any]) -> Iterator[Any]:
        rank, size = self.process_index, self.batch_size
        batches = iter(batches)
        first_round: list[Any] = []
        partial_round: list[Any] = []
        while round_batches := list(islice(batches, self.num_processes)):
            first_round = first_round or round_batches
            if partial_round and all(map(len, partial_round)):  # it was not the last round
                yield partial_round[rank]
            is_full = len(round_batches) == self.num_processes and size in (None, len(round_batches[-1]))
            partial_round = [] if is_full else round_batches
            if is_full:
                yield round_batches[rank]
        if self.drop_last or not partial_round:
            return
        if self.even_batches and size is None:
            yield next(islice(chain(partial_round, cycle(first_round)), rank, None))
        elif self.even_batches and size is not None:
            samples = chain(chain.from_iterable(partial_round), cycle(list(chain.from_iterable(first_round))))
            yield list(islice(samples, rank * size, (rank + 1) * size))
        elif rank < len(partial_round) and len(partial_round[rank]):
            yield partial_round[rank]

    def __len__(self) -> int:
        rounds, num_left = divmod(len(self.batch_sampler), self.num_processes)
        return rounds + (not self.drop_last and num_left > (0 if self.even_batches else self.process_index))


def even_out(items: Iterable[Any], unit: int) -> Iterator[Any]:
    """Yield items, then the first ones again until their number is a multiple of `unit`.

    Example:
        >>> list(even_out([1, 2, 3], 2)), list(even_out([1], 3)), list(even_out([], 2))
        ([1, 2, 3, 1], [1, 1, 1], [])
    """
    first: list[Any] = []
    count = 0
    for item in items:
        if count < unit:
            first.append(item)
        count += 1
        yield item
    yield from islice(cycle(first), -count % unit)


class EvenedSampler(Sampler[Any]):
    """Fill up another sampler, of indices or of batches, to a multiple of `unit`; see `even_out`."""

    def __init__(self, sampler: Any, *, unit: int) -> None:
        self.sampler = sampler
        self._unit = unit

    def __iter__(self) -> Iterator[Any]:
        return even_out(self.sampler, self._unit)

    def __len__(self) -> int:
        return -(-len(self.sampler) // self._unit) * self._unit


class Later(Sampler[Any]):
    """Skip the first items of another sampler, of indices or of batches, without reading data.

    The skipped items are drawn, unless `pick` can avoid it.
    """

    def __init__(self, sampler: Any, skip: int) -> None:
        self.sampler = sampler
        self.skip = self._num_left = skip
        self._items: Iterator[Any] = iter(())
        self._is_picked = False

    def __iter__(self) -> Iterator[Any]:
        items = pick(self.sampler, (self.skip, None)) if self.skip else None
        self._is_picked = items is not None
        self._items, self._num_left = items or iter(self.sampler), self.skip
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        self.start()
        yield from self._items

    def start(self) -> None:
        """Draw the order now if the pass has begun: samplers otherwise draw it at the first item."""
        if self._num_left and self._is_picked:
            self._items = chain(list(islice(self._items, 1)), self._items)
        elif self._num_left:
            deque(islice(self._items, self._num_left), maxlen=0)
        self._num_left = 0

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.skip)


def pick(sampler: Any, *spans: Span) -> Iterator[Any] | None:
    """Iterate a sampler's items at some positions, in ascending order; None if the items before must be drawn too.

    hftrain's orders and torch's sequential one, plain batches of them and the ranks' shares can begin
    anywhere; a subclass of these with its own `__iter__` cannot.

    Example:
        >>> list(pick(BatchSampler(SequentialSampler(range(10)), 2, False), (0, 1), (3, None)))
        [[0, 1], [6, 7], [8, 9]]
    """
    kind, start = type(sampler), spans[0][0]
    if kind.__iter__ is ArraySampler.__iter__:
        return sampler.pick(*spans)  # type: ignore[no-any-return]
    if kind is SequentialSampler:
        return chain.from_iterable(range(len(sampler))[slice(*span)] for span in spans)
    if kind is Later:
        return pick(sampler.sampler, *_scaled(spans, shift=sampler.skip))
    if kind is BatchSampler:
        items: Any = pick(sampler.sampler, *_scaled(spans, factor=sampler.batch_size))
        return None if items is None else iter(BatchSampler(items, sampler.batch_size, sampler.drop_last))
    if len(spans) > 1 or spans[0][1] is not None:
        return None
    if kind is SeededBatches:
        batches = pick(sampler.batch_sampler, *spans)
        return None if batches is None else sampler.seeded(batches, start)
    return sampler.begin(start) if kind is RankBatches or getattr(kind, "passes_batches_on", False) else None


def _scaled(spans: Iterable[Span], *, factor: int = 1, shift: int = 0) -> list[Span]:
    return [(start * factor + shift, None if stop is None else stop * factor + shift) for start, stop in spans]


def samplers_of(loader: Any) -> list[Any]:
    """List the batch samplers and samplers inside a loader or sampler, each once, outermost first."""
    samplers: list[Any] = []
    for name in ("batch_sampler", "sampler"):
        inner = getattr(loader, name, None)
        if inner is not None:
            samplers += [part for part in (inner, *samplers_of(inner)) if not any(part is each for each in samplers)]
    return samplers


def reading_order(loader: Any) -> Any:
    """Return the order in which an evaluation reads its dataset if a sampler has sorted it; None otherwise."""
    return next((part.reading_order for part in samplers_of(loader) if hasattr(part, "reading_order")), None)


def give_generator(sampler: Any, *, seed: int) -> None:
    """Give torch's random samplers their own generator if they would use the global one; mutates them.

    Without it, the order can neither be reproduced at a resume nor be the same on several ranks.
    """
    for part in (sampler, *samplers_of(sampler)):
        is_random = isinstance(part, Sampler) and not isinstance(part, GlobalShuffleSampler)
        if is_random and getattr(part, "generator", part) is None:
            part.generator = new_generator(seed)


def share_of_datasets(data: Any) -> Any:
    """Return the share, with `rank` and `world_size`, that `datasets` gave a stream; None without one."""
    return getattr(data, "_distributed", None)


def is_rank_aware(sampler: Any) -> bool:
    """Return whether a sampler or dataset already gives each rank its own share.

    Recognised by the attributes of torch's `DistributedSampler`, of accelerate's shards and similar classes, by `rank`
    and `world_size`, and by those of what `datasets.distributed.split_dataset_by_node` returns.
    """
    if getattr(share_of_datasets(sampler), "world_size", 1) > 1:
        return True
    for size, rank_attribute in (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank")):
        if hasattr(sampler, rank_attribute) and getattr(sampler, size, 1) > 1:
            return True
    return False


def is_cut(part: Any) -> bool:
    """Return whether ranks cut their shares from this sampler or stream, which must then be the same on all of them."""
    return getattr(part, "is_cut", False) is True or is_rank_aware(part)
