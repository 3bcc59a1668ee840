"""Orders that are arrays: what they cost, and beginning in the middle of them."""

from __future__ import annotations

import tracemalloc
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
from support.loading import build
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from hftrain.data.feed import TrainFeed
from hftrain.data.samplers import (
    ArraySampler,
    ContiguousShard,
    EpochShuffleSampler,
    EvenedSampler,
    GlobalShuffleSampler,
    Later,
    RankBatches,
    pick,
    shuffled,
)
from hftrain.data.seeding import SeededBatches
from hftrain.extras.grouping import LengthShuffledSampler, LengthSortedSampler, grouped_order

NUM = 50_000
LENGTHS = numpy.random.default_rng(0).integers(1, 500, NUM)


class Counted(ArraySampler):
    """Zero to n - 1; counts the numbers that are made."""

    def __init__(self, num: int) -> None:
        self.num, self.num_made, self.num_draws = num, 0, 0

    def draw(self) -> Any:
        self.num_draws += 1
        return self

    def __getitem__(self, place: slice) -> Any:
        return _Part(self, range(self.num)[place])

    def __len__(self) -> int:
        return self.num


class _Part:
    def __init__(self, owner: Counted, numbers: range) -> None:
        self.owner, self.numbers = owner, numbers

    def __getitem__(self, place: slice) -> _Part:
        return _Part(self.owner, self.numbers[place])

    def __len__(self) -> int:
        return len(self.numbers)

    def tolist(self) -> list[int]:
        self.owner.num_made += len(self.numbers)
        return list(self.numbers)


class Reversed(EpochShuffleSampler):
    """A user's class that iterates in its own way."""

    def __iter__(self) -> Any:
        return iter(range(len(self) - 1, -1, -1))


def ranks(batches: Any, **options: Any) -> RankBatches:
    return RankBatches(batches, num_processes=3, process_index=1, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda order, drop: order,
        lambda order, drop: BatchSampler(order, 4, drop),
        lambda order, drop: ranks(BatchSampler(order, 2, drop)),
        lambda order, drop: ranks(BatchSampler(order, 2, drop), even_batches=False),
        lambda order, drop: SeededBatches(ranks(BatchSampler(Later(order, 3), 2, drop)), seed=1, rank=1),
        lambda order, drop: Later(Later(SeededBatches(BatchSampler(order, 2, drop), seed=1, rank=0), 1), 1),
    ],
)
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("num", [0, 1, 5, 12, 13, 23, 24])
def test_every_chain_can_begin_anywhere(make: Any, drop: bool, num: int) -> None:
    for order in (EpochShuffleSampler(range(num), seed=3), SequentialSampler(range(num)), Counted(num)):
        chain = make(order, drop)
        whole = list(chain)
        for start in range(len(whole) + 2):
            begun = pick(chain, (start, None))
            assert begun is not None
            items = list(begun)
            assert items == whole[start:] == list(Later(chain, start))
            # The random numbers of a batch are those of its place in the epoch.
            assert [getattr(item, "_parts", 0) for item in items] == [getattr(i, "_parts", 0) for i in whole[start:]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Reversed(range(9), seed=0),
        lambda: RandomSampler(range(9), generator=torch.Generator()),
        lambda: ContiguousShard(range(9), rank=0, world_size=2),
        lambda: BatchSampler(RandomSampler(range(9)), 2, False),
        lambda: type("Own", (SequentialSampler,), {})(range(9)),
        lambda: type("Own", (BatchSampler,), {})(SequentialSampler(range(9)), 2, False),
        lambda: ranks(BatchSampler(RandomSampler(range(9)), 2, False)),
        lambda: SeededBatches(BatchSampler(RandomSampler(range(9)), 2, False), seed=0, rank=0),
        lambda: EvenedSampler(RandomSampler(range(9)), unit=2),
        lambda: EvenedSampler(BatchSampler(SequentialSampler(range(9)), 2, False), unit=3),
    ],
)
def test_others_are_drawn_from_the_start(make: Any) -> None:
    assert pick(make(), (1, None)) is None
    torch.manual_seed(0)
    whole = list(make())
    torch.manual_seed(0)
    assert list(Later(make(), 1)) == whole[1:]


def test_only_what_is_read_is_made() -> None:
    order = Counted(10**12)
    chain = SeededBatches(ranks(BatchSampler(order, 8, False)), seed=0, rank=0)
    later = Later(chain, 10**10)
    assert next(iter(later)) == list(range(3 * 8 * 10**10 + 8, 3 * 8 * 10**10 + 16))
    assert order.num_made <= 3 * 8 + 4096
    assert order.num_draws == 1  # the iterators that a loader with workers makes and drops draw nothing


@pytest.mark.parametrize("num", [10**12])
def test_the_last_rank_evaluates_at_once(num: int) -> None:
    shard = ContiguousShard(SequentialSampler(range(num)), rank=1, world_size=2)
    assert list(islice(shard, 2)) == [num // 2, num // 2 + 1]


def test_an_order_takes_four_bytes_for_each_sample() -> None:
    for sampler in (
        EpochShuffleSampler(range(NUM), seed=0),
        GlobalShuffleSampler(range(NUM)),
        LengthShuffledSampler(LENGTHS, batch_size=32, seed=0, shuffles_batches=True),
        LengthSortedSampler(LENGTHS),
    ):
        drawn = sampler.draw()
        assert (len(drawn), drawn.nbytes) == (NUM, 4 * NUM)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EpochShuffleSampler(range(NUM), seed=0),
        lambda: GlobalShuffleSampler(range(NUM)),
        lambda: BatchSampler(SequentialSampler(range(NUM)), 64, False),
        lambda: Later(ranks(BatchSampler(EpochShuffleSampler(range(NUM), seed=0), 8, False)), 500),
    ],
)
def test_python_integers_are_made_a_few_at_a_time(make: Any) -> None:
    """The tensor is not counted: tracemalloc sees Python's own memory."""
    sampler = make()
    tracemalloc.start()
    try:
        num_read = sum(1 for _ in sampler)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_read > 500
    assert peak < 8 * NUM


def test_grouping_takes_little_more_than_the_order(monkeypatch: Any) -> None:
    monkeypatch.setattr("hftrain.extras.grouping._SORTED_AT_ONCE", 1000)
    tracemalloc.start()
    try:
        grouped_order(LENGTHS, 5, generator=torch.Generator())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * NUM  # more than 40 bytes for each sample if all are sorted at once


@pytest.mark.parametrize("size", [1, 7, 40])
@pytest.mark.parametrize("num", [10, 40, 4003])
def test_groups_are_sorted_alike_some_at_a_time(monkeypatch: Any, num: int, size: int) -> None:
    orders = []
    for at_once in (1, 100, 10**6):
        monkeypatch.setattr("hftrain.extras.grouping._SORTED_AT_ONCE", at_once)
        orders.append(grouped_order(LENGTHS[:num], size, generator=torch.Generator().manual_seed(0)).tolist())
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("num", [1, 10, 99_999])
def test_the_order_and_the_generator_do_not_depend_on_the_type(num: int) -> None:
    ours, theirs = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    assert shuffled(num, ours).tolist() == torch.randperm(num, generator=theirs).tolist()
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_the_global_shuffle_is_torchs() -> None:
    orders = []
    for kind in (GlobalShuffleSampler, RandomSampler):
        torch.manual_seed(0)
        orders.append([list(kind(range(50))), list(kind(range(50))), torch.rand(1).item()])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_feed_begins_in_the_middle_of_a_large_set(workers: int) -> None:
    loader = build(range(10**12), batch_size=2, shuffle=False, rank=1, world_size=2, num_workers=workers)
    first = next(TrainFeed(loader, seed=7).open(0, skip=10**11, offset=1))
    assert first == [4 * 10**11 + 3, 4 * 10**11 + 4]
