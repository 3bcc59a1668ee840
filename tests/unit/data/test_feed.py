from __future__ import annotations

import random

import numpy
import pytest
import torch
from support.loading import build
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from hftrain.data import sharding
from hftrain.data.feed import TrainFeed


class Items:
    """Draws at random and remembers which samples it was asked for."""

    def __init__(self, n=11):
        self.n = n
        self.read = []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.read.append(index)
        return index, random.random(), float(torch.rand(()))


class Stream(IterableDataset):
    def __init__(self):
        self.generator = torch.Generator()

    def __iter__(self):
        for index in torch.randperm(11, generator=self.generator).tolist():
            self.num_read = getattr(self, "num_read", 0) + 1
            yield index, random.random(), numpy.random.random(), float(torch.rand(()))


class Recorder:
    def __init__(self, inner=()):
        self.inner = inner
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index]


def formula(n, epoch, seed=42):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def feed(dataset, **config):
    loader = build(dataset, batch_size=2, **config)
    return TrainFeed(loader, seed=42)


def generators():
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()


def test_stream_that_is_read_for_all_ranks_draws_numbers_of_its_own(monkeypatch):
    monkeypatch.setattr(sharding.DispatchLoader, "_scatter", lambda self, parcels: None)
    options = {"rank": 0, "world_size": 2, "dispatch_batches": True}
    before = generators()
    whole = list(feed(Stream(), **options).open(1))
    assert generators() == before
    assert list(feed(Stream(), **options).open(1, skip=1)) == whole[1:]


def test_open_tells_the_epoch_to_every_part_once():
    sampler, dataset = Recorder([2, 0, 1]), Recorder([7, 8, 9])
    data = TrainFeed(DataLoader(dataset, batch_size=2, sampler=sampler, collate_fn=list), seed=0)
    assert [batch for epoch in (0, 5) for batch in data.open(epoch)] == [[9, 7], [8]] * 2
    assert (sampler.epochs, dataset.epochs) == ([0, 5], [0, 5])
    assert list(data.open(6, skip=1)) == [[8]]
    assert (sampler.epochs, dataset.epochs) == ([0, 5, 6], [0, 5, 6])

    batches = Recorder([[0], [2, 1]])
    data = TrainFeed(DataLoader(dataset, batch_sampler=batches, collate_fn=list), seed=0)
    assert list(data.open(3, skip=1)) == [[9, 8]]
    assert batches.epochs == [3]

    loader = Recorder([1, 2, 3])
    assert list(TrainFeed(loader, seed=0).open(4, skip=2)) == [3]
    assert loader.epochs == [4]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_users_shuffling_loader_becomes_reproducible(num_workers):
    def user_feed():
        return TrainFeed(DataLoader(Items(), 2, shuffle=True, collate_fn=list, num_workers=num_workers), seed=42)

    before = torch.get_rng_state()
    data = user_feed()
    orders = [[batch[0][0] for batch in data.open(epoch)] for epoch in (0, 1)]
    if num_workers:
        assert torch.equal(torch.get_rng_state(), before)
    assert orders[1] == formula(11, 1)[::2]
    assert [batch[0][0] for batch in user_feed().open(1, skip=3)] == orders[1][3:]


def orders_of(feed, epochs=(0, 1)):
    return [[int(batch) for batch in feed.open(epoch)] for epoch in epochs]


def seeded_loader(seed):
    return DataLoader(range(11), 1, sampler=RandomSampler(range(11), generator=torch.Generator().manual_seed(seed)))


def test_a_users_generator_is_kept_and_starts_from_its_own_seed():
    plain = [int(batch) for batch in seeded_loader(9)]
    loader = seeded_loader(9)
    orders = orders_of(TrainFeed(loader, seed=42))
    assert orders == [plain, formula(11, 1, seed=9)]
    # Another run over the same loader, and one with another data seed.
    assert orders_of(TrainFeed(loader, seed=42)) == orders_of(TrainFeed(loader, seed=1)) == orders
    assert orders_of(TrainFeed(seeded_loader(10), seed=42)) != orders


def test_a_user_can_seed_a_generator_again():
    loader = seeded_loader(9)
    orders_of(TrainFeed(loader, seed=42))
    loader.sampler.generator.manual_seed(5)
    assert orders_of(TrainFeed(loader, seed=42)) == [formula(11, 0, seed=5), formula(11, 1, seed=5)]


def test_the_data_seed_counts_where_a_user_gave_none():
    loader = DataLoader(range(11), 1, shuffle=True)
    assert orders_of(TrainFeed(loader, seed=1), [1]) == [formula(11, 1, seed=1)]
    assert orders_of(TrainFeed(loader, seed=7), [1]) == [formula(11, 1, seed=7)]


def test_own_seeds_of_the_saved_run_go_on_where_a_script_draws_others():
    saved = TrainFeed(seeded_loader(9), seed=42)
    orders = orders_of(saved)
    for skip in (0, 4):
        resumed = TrainFeed(seeded_loader(10), seed=42)
        resumed.load_state_dict(saved.state_dict())
        assert [int(batch) for batch in resumed.open(1, skip=skip)] == orders[1][skip:]
    with pytest.raises(ValueError, match="none that was saved"):
        resumed.load_state_dict({"own_seeds": ["nine"]})


def test_loaders_that_iterate_in_their_own_way_are_read_and_dropped():
    class OwnWay(DataLoader):
        def __iter__(self):
            return (batch * 10 for batch in super().__iter__())

    data = TrainFeed(OwnWay(torch.arange(4)), seed=0)
    assert [int(batch) for batch in data.open(0, skip=2)] == [20, 30]


def test_state_of_a_loader_counts_only_where_it_is_the_one_that_is_read():
    class Telling(DataLoader):
        def state_dict(self):
            return {"place": 0}

        def load_state_dict(self, state):
            raise AssertionError

    data = TrainFeed(Telling(range(8), batch_size=2), seed=0)
    for skip, tells in ((0, True), (1, False)):
        next(data.open(0, skip=skip))
        assert ("loader" in data.state_dict()) is tells
