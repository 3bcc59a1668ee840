"""Loaders that begin in the middle of an epoch, and how many samples a micro-step holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.loading import build as build_any
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from hftrain.core.errors import CheckpointError
from hftrain.data.feed import TrainFeed
from hftrain.data.states import OffsetStream, begin_at, has_own_shares, num_batches_from, samples_per_round


class Count(IterableDataset[int]):
    """The numbers from 0, drawn in an order of its own if it is told an epoch."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.generator = torch.Generator()
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num))

    def __len__(self) -> int:
        return self.num


def build(dataset: Any, batch_size: int = 2, **options: Any) -> Any:
    return build_any(dataset, batch_size=batch_size, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_cut_the_rest_of_the_same_order(world_size: int, workers: int) -> None:
    loaders = [
        build(list(range(11)), shuffle=False, rank=rank, world_size=world_size, num_workers=workers)
        for rank in range(world_size)
    ]
    for offset in range(11):
        shifted = [begin_at(loader, offset=offset)[0] for loader in loaders]
        rounds = [list(loader) for loader in shifted] if workers == 0 or offset == 3 else None
        assert len({len(loader) for loader in shifted}) == 1
        if rounds is not None:
            order = [sample for batches in zip(*rounds, strict=True) for batch in batches for sample in batch]
            assert order[: 11 - offset] == list(range(offset, 11))
            assert len(rounds[0]) == len(shifted[0]) == -(-(11 - offset) // (2 * world_size))


def test_a_feed_skips_batches_after_the_offset() -> None:
    feed = TrainFeed(build(list(range(20)), batch_size=4), seed=7)
    whole = [sample for batch in feed.open(1) for sample in batch]
    assert [sample for batch in feed.open(1, skip=2, offset=3) for sample in batch] == whole[11:]
    assert [sample for batch in feed.open(1) for sample in batch] == whole


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True, "num_workers": 1}])
def test_a_stream_leaves_out_its_first_samples(options: dict[str, Any]) -> None:
    stream = Count(7)
    feed = TrainFeed(build(stream, batch_size=2, seed=7, **options), seed=7)
    assert list(feed.open(2, offset=3)) == [[3, 4], [5, 6]]
    assert list(feed.open(2, offset=1, skip=1)) == [[3, 4], [5, 6]]
    assert stream.epochs[-1] == 2
    assert stream.generator.initial_seed() == 9
    assert num_batches_from(feed.loader, 3) == 2


def test_a_stream_without_epochs_is_left_alone() -> None:
    bare = OffsetStream(range(4), offset=1)
    bare.set_epoch(3)
    assert (bare.generator, list(bare)) == (None, [1, 2, 3])


@pytest.mark.parametrize("even_batches", [True, False])
def test_ranks_share_the_rest_of_a_stream(even_batches: bool) -> None:
    rounds = [
        list(begin_at(build(Count(11), rank=rank, world_size=2, even_batches=even_batches), offset=3)[0])
        for rank in (0, 1)
    ]
    assert [rounds[0][0], rounds[1][0], rounds[0][1], rounds[1][1]] == [[3, 4], [5, 6], [7, 8], [9, 10]]


def test_samples_of_a_round_are_those_of_all_ranks() -> None:
    rows = list(range(20))
    assert samples_per_round(build(rows), world_size=1) == 2
    assert samples_per_round(build(rows, rank=1, world_size=2, num_workers=1), world_size=2) == 4
    assert samples_per_round(build(rows, batch_size=4, world_size=2, split_batches=True), world_size=2) == 4
    assert samples_per_round(build(Count(20), batch_size=3), world_size=1) == 3
    assert samples_per_round(build(Count(20), num_workers=1), world_size=1) == 2
    assert samples_per_round(build(Count(20), num_workers=2), world_size=1) is None
    assert samples_per_round(DataLoader(rows, batch_size=None), world_size=1) is None
    assert samples_per_round([rows], world_size=1) is None


class Own(BatchSampler):
    """Batches of whatever size."""


def test_batches_of_an_own_kind_are_unknown() -> None:
    loader: Any = DataLoader(list(range(8)), batch_sampler=Own(SequentialSampler(range(8)), 2, False))
    assert samples_per_round(loader, world_size=1) is None
    with pytest.raises(CheckpointError, match="Own, which batches"):
        begin_at(loader, offset=1)


def test_what_cannot_begin_at_a_sample_is_refused() -> None:
    with pytest.raises(CheckpointError, match="list, which iterates in its own way"):
        begin_at([[1, 2]], offset=1)
    with pytest.raises(CheckpointError, match="DistributedSampler, which batches or shards the data itself"):
        begin_at(shared_by_torch(), offset=1)


def shared_by_torch() -> Any:
    return DataLoader(list(range(8)), batch_size=2, sampler=DistributedSampler(range(8), num_replicas=2, rank=0))


class Shared(Count):
    """A stream that knows its rank, as `split_dataset_by_node` makes them."""

    _distributed = type("Place", (), {"world_size": 2, "rank": 0})()


class Strided(SequentialSampler):
    """A sampler that shares out in a way of its own."""

    num_replicas, rank = 2, 0


def test_shares_of_an_own_kind_are_recognised() -> None:
    def is_own(loader: Any, world_size: int = 2) -> bool:
        return has_own_shares(loader, world_size=world_size)

    assert not is_own(build(list(range(8)), rank=0, world_size=2))
    assert not is_own(build(Count(8), rank=0, world_size=2))
    assert not is_own(shared_by_torch())
    assert not is_own([1])
    assert is_own(build(Shared(8), rank=0, world_size=2))
    assert is_own(DataLoader(list(range(8)), batch_size=2, sampler=Strided(range(8))))
    assert is_own(DataLoader(list(range(8)), batch_size=2))
    assert not is_own(DataLoader(list(range(8)), batch_size=2), world_size=1)
