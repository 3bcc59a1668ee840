from __future__ import annotations

import pytest
import torch
from support.loading import stream_share
from torch.utils.data import DataLoader, IterableDataset

from hftrain.core.errors import ConfigError
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
