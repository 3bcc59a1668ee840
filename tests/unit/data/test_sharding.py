from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from hftrain.core.errors import ConfigError
from hftrain.data.sharding import ShardPlan, is_plain_loader


class OwnBatches:
    """A batch sampler of uneven batches that tells no batch size."""

    def __iter__(self):
        return iter([[0], [1, 2], [3], [4, 5, 6]])

    def __len__(self):
        return 4


class OwnWay(DataLoader):
    def __iter__(self):
        return iter([1])


def shares(loader, *, is_training, world_size=2, **options):
    return [
        [
            list(batch)
            for batch in shard_loader(loader, rank=r, world_size=world_size, is_training=is_training, **options)
        ]
        for r in range(world_size)
    ]


def loader_of(dataset, **options):
    if "batch_sampler" not in options:
        options.setdefault("batch_size", 2)
    return DataLoader(dataset, collate_fn=list, **options)


def shard_loader(loader, **plan):
    return ShardPlan(**plan).share(loader)


def test_own_batch_samplers_are_shared_out_in_training():
    parts = shares(loader_of(range(7), batch_sampler=OwnBatches()), is_training=True)
    assert parts == [[[0], [3]], [[1, 2], [4, 5, 6]]]


def test_unbatched_loaders():
    data = torch.arange(8)
    loader = DataLoader(data, sampler=BatchSampler(SequentialSampler(data), 2, False), batch_size=None)
    for is_training in (True, False):
        parts = shares(loader, is_training=is_training)
        assert sorted(int(i) for part in parts for batch in part for i in batch) == list(range(8))


@pytest.mark.parametrize(("is_training", "lengths"), [(True, [1, 1]), (False, [2, 1])])
def test_a_last_round_that_is_not_full_is_sent_in_evaluations_alone(is_training, lengths):
    loader = loader_of(range(7), drop_last=True)
    parts = [
        ShardPlan(rank=r, world_size=2, is_training=is_training, dispatch_batches=True).share(loader) for r in (0, 1)
    ]
    assert [len(part) for part in parts] == lengths


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (OwnWay(range(4)), {}, "iterates in its own way"),
        (DataLoader(range(4), batch_size=None), {}, "no batches"),
    ],
)
def test_loaders_that_cannot_be_split_raise(loader, options, message):
    with pytest.raises(ConfigError, match=message):
        shard_loader(loader, rank=0, world_size=2, is_training=True, **options)


def prepared(dataset: Any, rank: int, **options: Any) -> Any:
    """Return what `Accelerator.prepare` makes of a loader in one of two processes."""
    loader = DataLoader(dataset, batch_size=2)
    return prepare_data_loader(loader, num_processes=2, process_index=rank, put_on_device=False, **options)


class Numbers(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(7))


@pytest.mark.parametrize("options", [{}, {"even_batches": False}, {"split_batches": True}], ids=str)
@pytest.mark.parametrize("dataset", [range(7), Numbers()], ids=["map", "stream"])
def test_prepared_loader_keeps_its_share_to_train_and_repeats_nothing_to_evaluate(dataset, options):
    shares: list[list[int]] = []
    for rank in (0, 1):
        given = prepared(dataset, rank, **options)
        trained = shard_loader(given, rank=rank, world_size=2, is_training=True)
        assert is_plain_loader(trained)
        assert [batch.tolist() for batch in trained] == [batch.tolist() for batch in given]
        evaluated = shard_loader(given, rank=rank, world_size=2, is_training=False, dispatch_batches=False)
        shares.append([int(value) for batch in evaluated for value in batch])
    assert sorted(shares[0] + shares[1]) == list(range(7))
    if isinstance(dataset, range):
        assert shares[0] + shares[1] == list(range(7))
