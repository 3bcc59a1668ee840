from __future__ import annotations

import time

import pytest
import torch
from support.loading import stream_share
from torch.utils.data import DataLoader, IterableDataset

from hftrain.core.errors import ConfigError
from hftrain.data.datasets import set_dataset_epoch
from hftrain.extras.streams import EpochStream


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))

    def __len__(self):
        return self.n


class ShuffledStream(IterableDataset):
    def __init__(self):
        self.generator = torch.Generator()

    def __iter__(self):
        return iter(torch.randperm(6, generator=self.generator).tolist())


class EpochAware(IterableDataset):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch] * 4)


def share(dataset, *, rank, world_size, **changes):
    return stream_share(dataset, rank=rank, world_size=world_size, **{"is_training": False, "seed": 0, **changes})


def test_set_dataset_epoch_leaves_map_style_generators_alone():
    class Items:
        generator = torch.Generator().manual_seed(5)

    set_dataset_epoch(Items(), epoch=1, seed=0)
    assert Items.generator.initial_seed() == 5


def test_epoch_stream_leaves_the_stream_alone_until_told():
    inner = EpochAware()
    stream = EpochStream(inner, seed=0, rank=0)
    assert list(stream) == [None] * 4
    stream.set_epoch(3)
    assert list(stream) == [3] * 4
    assert len(EpochStream(Stream(5), seed=0, rank=0)) == 5


def test_epoch_stream_does_not_seed_the_main_process():
    stream = EpochStream(Stream(3), seed=0, rank=0)
    stream.set_epoch(1)
    before = torch.get_rng_state()
    list(stream)
    assert torch.equal(torch.get_rng_state(), before)


class SharedEpoch(IterableDataset):
    """Keeps its epoch as streams of `datasets` do: shared by all copies, and changed by a difference."""

    def __init__(self):
        self.epoch = torch.tensor(0).share_memory_()

    def set_epoch(self, epoch):
        difference = epoch - self.epoch
        time.sleep(0.2)  # long enough for another worker to come in between
        self.epoch += difference

    def __iter__(self):
        return iter([int(self.epoch)] * 2)


def test_epoch_that_copies_share_is_changed_once():
    stream = EpochStream(SharedEpoch(), seed=0, rank=0)
    loader = DataLoader(stream, batch_size=2, num_workers=2, persistent_workers=True)
    seen = []
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        seen += [batch.tolist() for batch in loader]
    assert seen == [[0, 0], [0, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("n", range(1, 18))
def test_evaluation_shares_are_disjoint_and_complete(n, world_size):
    parts = [share(Stream(n), rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [len(part) for part in parts] == [len(list(part)) for part in parts]
    shares = [[batch.tolist() for batch in DataLoader(part, batch_size=2)] for part in parts]
    whole = [batch.tolist() for batch in DataLoader(Stream(n), batch_size=2)]
    assert [shares[i % world_size][i // world_size] for i in range(len(whole))] == whole
    assert sum(map(len, shares)) == len(whole)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("n", range(1, 18))
def test_training_shares_have_equal_lengths(n, world_size, drop_last):
    shares = [
        share(Stream(n), rank=rank, world_size=world_size, is_training=True, drop_last=drop_last)
        for rank in range(world_size)
    ]
    items = [list(shard) for shard in shares]
    assert len({len(part) for part in items}) == 1
    assert [len(shard) for shard in shares] == [len(part) for part in items]
    if not drop_last:
        assert {i for part in items for i in part} == set(range(n))


def test_training_shares_without_evening_repeat_nothing():
    items = [list(share(Stream(7), rank=rank, world_size=2, is_training=True, even_batches=False)) for rank in (0, 1)]
    assert items == [[0, 1, 4, 5], [2, 3, 6]]


def test_training_shares_hear_of_the_epoch():
    for even_batches in (True, False):
        inner = ShuffledStream()
        shard = share(inner, rank=0, world_size=2, is_training=True, even_batches=even_batches)
        shard.set_epoch(3)
        order = torch.randperm(6, generator=torch.Generator().manual_seed(3)).tolist()
        assert list(shard)[:4] == [*order[:2], *order[4:6]]


def test_evaluation_shares_with_several_workers_raise():
    with pytest.raises(ConfigError, match="dataloader_num_workers=1"):
        share(Stream(4), rank=0, world_size=2, num_workers=2)
    assert list(share(Stream(4), rank=1, world_size=2, num_workers=1)) == [2, 3]


def test_epoch_stream_reaches_persistent_workers():
    stream = EpochStream(EpochAware(), seed=0, rank=0)
    loader = DataLoader(stream, batch_size=4, num_workers=1, persistent_workers=True)
    seen = []
    for epoch in (0, 1, 2):
        stream.set_epoch(epoch)
        seen += [batch.tolist() for batch in loader]
    assert seen == [[0] * 4, [1] * 4, [2] * 4]
