"""The documented samplers, shards and helpers of loaders."""

from __future__ import annotations

from typing import Any

import pytest

from hftrain import (
    ConfigError,
    DistributedLengthGroupedSampler,
    IterableDatasetShard,
    LengthGroupedSampler,
    SequentialDistributedSampler,
)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("number", [0, 3, 8, 11])
def test_shards_of_a_stream_are_equally_long_and_hold_everything(number: int, drop_last: bool) -> None:
    shards = [IterableDatasetShard(range(number), 2, drop_last, 2, rank) for rank in (0, 1)]
    found = [list(shard) for shard in shards]
    assert [len(shard) for shard in shards] == [len(each) for each in found]
    whole = number - number % 4 if drop_last else number
    assert set(found[0] + found[1]) == set(range(whole))
    assert shards[0].num_examples == number


class Seeded:
    """A stream that has its own generator, and one that is told the epoch."""

    epoch = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_epoch_reaches_the_stream() -> None:
    stream = Seeded()
    IterableDatasetShard(stream).set_epoch(3)
    assert stream.epoch == 3


def test_sequential_shares_are_padded_to_the_batch() -> None:
    shares = [list(SequentialDistributedSampler(range(5), 2, rank, batch_size=2)) for rank in (0, 1)]
    assert shares == [[0, 1, 2, 3], [4, 0, 1, 2]]


def test_distributed_lengths_fill_up_or_drop() -> None:
    lengths = [3, 1, 4, 1, 5]
    for drop_last, size in ((False, 3), (True, 2)):
        shares = [
            list(DistributedLengthGroupedSampler(1, lengths=lengths, num_replicas=2, rank=rank, drop_last=drop_last))
            for rank in (0, 1)
        ]
        assert [len(share) for share in shares] == [size, size]
        assert len(set(shares[0] + shares[1])) == (4 if drop_last else 5)


@pytest.mark.parametrize("given", [{}, {"dataset": ["text"]}, {"dataset": [{"ids": [1]}]}])
def test_sampler_without_lengths_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"by length|read the lengths"):
        LengthGroupedSampler(2, **given)
