from __future__ import annotations

import random

import numpy
import pytest
import torch
from support.loading import build
from torch.utils.data import DistributedSampler, IterableDataset

from hftrain.core.errors import ConfigError
from hftrain.data.feed import TrainFeed
from hftrain.data.samplers import GlobalShuffleSampler


class Stream(IterableDataset):
    def __init__(self, n=7):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class RandomItems:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index, random.random(), float(numpy.random.rand()), float(torch.rand(()))


def formula(n, epoch=0, seed=42):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def flat(batches):
    return [item for batch in batches for item in batch]


def train(dataset, **options):
    return build(dataset, collate=list, **{"batch_size": 2, **options})


def evaluate(dataset, **options):
    return build(dataset, collate=list, is_training=False, **{"batch_size": 2, **options})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_order_follows_the_formula(num_workers):
    loader = train(range(11), num_workers=num_workers)
    assert flat(loader) == formula(11)


def test_unseeded_order_comes_from_the_global_generator():
    loader = train(range(20), use_seedable_sampler=False)
    assert type(loader.sampler) is GlobalShuffleSampler
    with torch.random.fork_rng():
        orders = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            orders.append(flat(loader))
    assert orders[0] == orders[1] != orders[2]


def test_unseeded_order_is_shared_by_ranks_seeded_alike():
    shares = []
    with torch.random.fork_rng():
        for rank in (0, 1):
            torch.manual_seed(3)
            shares += flat(train(range(8), use_seedable_sampler=False, rank=rank, world_size=2))
    assert sorted(shares) == list(range(8))


@pytest.mark.parametrize("build", [train, evaluate])
def test_random_numbers_do_not_depend_on_the_number_of_workers(build):
    one, two = ([sorted(batch) for batch in build(RandomItems(), num_workers=n)] for n in (1, 2))
    assert one == two
    assert len({item[1:] for batch in one for item in batch}) == 6


class RandomStream(Stream):
    def __iter__(self):
        return iter([random.random(), float(torch.rand(()))])


@pytest.mark.parametrize("dataset", [RandomItems(), RandomStream()], ids=["items", "stream"])
def test_training_workers_draw_other_numbers_in_each_epoch(dataset):
    feed = TrainFeed(train(dataset, num_workers=1, shuffle=False), seed=42)
    assert list(feed.open(0)) != list(feed.open(1))


@pytest.mark.parametrize("even_batches", [True, False])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("n", range(1, 18))
def test_training_shares_of_all_ranks(n, world_size, split_batches, drop_last, even_batches):
    size = 2 * world_size if split_batches else 2
    options = {
        "batch_size": size,
        "split_batches": split_batches,
        "drop_last": drop_last,
        "even_batches": even_batches,
        "world_size": world_size,
    }
    try:
        loaders = [train(range(n), rank=rank, **options) for rank in range(world_size)]
    except ConfigError:
        assert n < 2 * world_size
        return
    shares = [list(loader) for loader in loaders]
    seen = [i for share in shares for batch in share for i in batch]
    assert [len(loader) for loader in loaders] == [len(share) for share in shares]
    if even_batches or drop_last:
        assert len({len(share) for share in shares}) == 1
    if not even_batches or drop_last or world_size == 1:
        assert len(seen) == len(set(seen))
    if not drop_last:
        assert set(seen) == set(range(n))
    whole = formula(n)
    assert shares[0][0] == (whole * 2)[: len(shares[0][0])]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("split_batches", [False, True])
def test_evaluation_shares_restore_the_order(num_workers, split_batches):
    options = {"split_batches": split_batches, "num_workers": num_workers, "batch_size": 6}
    for n in (1, 2, 7, 17) if num_workers == 0 else (5,):
        for world_size in (1, 2, 3):
            loaders = [evaluate(range(n), rank=r, world_size=world_size, **options) for r in range(world_size)]
            batches = [batch for loader in loaders for batch in loader]
            assert flat(batches) == list(range(n))
            assert max(map(len, batches)) <= (6 // world_size if split_batches else 6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_drops_the_same_samples_on_any_number_of_ranks(world_size):
    loaders = [evaluate(range(11), rank=r, world_size=world_size, drop_last=True) for r in range(world_size)]
    assert [i for loader in loaders for batch in loader for i in batch] == list(range(10))


@pytest.mark.parametrize("build", [train, evaluate])
def test_a_sampler_made_for_ranks_is_not_split_again(build):
    sampler = DistributedSampler(range(8), num_replicas=2, rank=1, shuffle=False)
    assert flat(build(range(8), sampler=sampler, rank=1, world_size=2)) == [1, 3, 5, 7]


@pytest.mark.parametrize("build", [train, evaluate])
def test_streams_are_shared_out_batch_by_batch(build):
    shares = [list(build(Stream(8), rank=rank, world_size=2)) for rank in (0, 1)]
    assert shares == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    shares = [list(build(Stream(8), rank=r, world_size=2, split_batches=True, batch_size=4)) for r in (0, 1)]
    assert shares == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_stream_tails():
    assert [list(train(Stream(5), rank=rank, world_size=2)) for rank in (0, 1)] == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    assert [list(evaluate(Stream(5), rank=rank, world_size=2)) for rank in (0, 1)] == [[[0, 1], [4]], [[2, 3]]]
    assert [list(evaluate(Stream(5), rank=r, world_size=2, drop_last=True)) for r in (0, 1)] == [[[0, 1]], [[2, 3]]]
    uneven = {"world_size": 2, "drop_last": True, "even_batches": False}
    assert [list(train(Stream(7), rank=rank, **uneven)) for rank in (0, 1)] == [[[0, 1], [4, 5]], [[2, 3]]]


@pytest.mark.parametrize("build", [train, evaluate])
@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ([], {}, "It is empty"),
        (range(4), {"split_batches": True, "batch_size": 3, "world_size": 2}, "multiple of the number"),
    ],
)
def test_unusable_datasets_raise(build, dataset, options, message):
    with pytest.raises(ConfigError, match=message):
        build(dataset, **options)


def test_training_without_a_full_batch_raises():
    with pytest.raises(ConfigError, match="dataloader_drop_last=False"):
        train(range(3), drop_last=True, world_size=2)
    assert list(evaluate([1], drop_last=True)) == []


def test_set_epoch_out_of_reach_raises():
    class Items(RandomItems):
        def set_epoch(self, epoch):
            raise AssertionError

    with pytest.raises(ConfigError, match="dataloader_persistent_workers=False"):
        train(Items(), num_workers=1, persistent_workers=True)
