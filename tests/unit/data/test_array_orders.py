"""Orders that are arrays: what they cost, and beginning in the middle of them."""

from __future__ import annotations

from typing import Any

import pytest
from support.loading import build
from torch.utils.data import BatchSampler, SequentialSampler

from hftrain.data.feed import TrainFeed
from hftrain.data.samplers import (
    ArraySampler,
    EpochShuffleSampler,
    Later,
    RankBatches,
    pick,
)
from hftrain.data.seeding import SeededBatches


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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_feed_begins_in_the_middle_of_a_large_set(workers: int) -> None:
    loader = build(range(10**12), batch_size=2, shuffle=False, rank=1, world_size=2, num_workers=workers)
    first = next(TrainFeed(loader, seed=7).open(0, skip=10**11, offset=1))
    assert first == [4 * 10**11 + 3, 4 * 10**11 + 4]
