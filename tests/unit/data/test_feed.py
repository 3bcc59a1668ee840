from __future__ import annotations

import multiprocessing
import os
import random

import numpy
import pytest
import torch
from support.loading import build
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from hftrain.core.seed import capture_rng, restore_rng
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


class WorkerIds(Items):
    def __getitem__(self, index):
        return os.getpid()


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


def ids(batches):
    return [item[0] for batch in batches for item in batch]


WORKERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.mark.parametrize("config", WORKERS)
def test_open_gives_each_epoch_its_order(config):
    data = feed(Items(), **config)
    assert data.num_batches == 6
    for epoch in (0, 1, 1, 3):
        assert ids(data.open(epoch)) == formula(11, epoch)


@pytest.mark.parametrize("config", WORKERS[1:])
@pytest.mark.parametrize("make", [Items, Stream])
@pytest.mark.parametrize("skip", [1, 4])
def test_resume_gives_the_same_batches_down_to_random_numbers(make, config, skip):
    steady = feed(make(), **config)
    epochs = [list(steady.open(epoch)) for epoch in (0, 1)]
    resumed = feed(make(), **config)
    assert list(resumed.open(1, skip=skip)) == epochs[1][skip:]
    assert list(resumed.open(0)) == epochs[0]


def test_skip_reads_no_sample_and_draws_no_number():
    dataset = Items()
    before = torch.get_rng_state()
    iterator = feed(dataset).open(0, skip=4)
    assert dataset.read == []
    assert torch.equal(torch.get_rng_state(), before)
    next(iterator)
    assert dataset.read == formula(11, 0)[8:10]


def generators():
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()


def test_skipping_streams_is_done_before_open_returns():
    stream = Stream()
    iterator = feed(stream).open(0, skip=2)
    assert stream.num_read == 4
    assert next(iterator)[0][0] == formula(11, 0)[4]


def test_streams_begin_with_a_copy_of_the_numbers():
    before = capture_rng()
    whole = list(feed(Stream()).open(1))
    after = generators()
    # As if it had drawn from them itself: nothing else did.
    restore_rng(before)
    assert [drawn for _, *drawn in Stream()] == [drawn for batch in whole for _, *drawn in batch]
    assert generators() == after
    # Another draw meanwhile changes nothing, and then the numbers are the others'.
    for skip in (0, 2):
        restore_rng(before)
        resumed = feed(Stream()).open(1, skip=skip)
        random.random(), numpy.random.random(), torch.rand(())
        others = generators()
        assert list(resumed) == whole[skip:]
        assert generators() == others


def test_stream_that_is_read_for_all_ranks_draws_numbers_of_its_own(monkeypatch):
    monkeypatch.setattr(sharding.DispatchLoader, "_scatter", lambda self, parcels: None)
    options = {"rank": 0, "world_size": 2, "dispatch_batches": True}
    before = generators()
    whole = list(feed(Stream(), **options).open(1))
    assert generators() == before
    assert list(feed(Stream(), **options).open(1, skip=1)) == whole[1:]


@pytest.mark.parametrize("skip", [6, 9])
@pytest.mark.parametrize("make", [Items, Stream])
def test_skipping_everything_leaves_nothing(make, skip):
    assert list(feed(make()).open(0, skip=skip)) == []


def test_persistent_workers_survive_epochs_and_end_with_the_loader():
    data = feed(WorkerIds(), num_workers=1, persistent_workers=True)
    first = next(data.open(0))[0]
    assert {pid for epoch in (1, 2) for batch in data.open(epoch) for pid in batch} == {first}
    assert {pid for batch in data.open(3, skip=1) for pid in batch}.isdisjoint({first, os.getpid()})
    assert {pid for batch in data.open(4) for pid in batch} == {first}
    del data
    assert multiprocessing.active_children() == []


def test_abandoned_epochs_leave_no_worker():
    data = feed(Items(), num_workers=2)
    for skip in (0, 2):
        iterator = data.open(0, skip=skip)
        next(iterator)
        assert len(multiprocessing.active_children()) == 2
        del iterator
        assert multiprocessing.active_children() == []


@pytest.mark.parametrize("state", [5, "x", [1], torch.ones(()), {"num_workers": torch.ones(2)}])
def test_state_that_no_feed_has_is_refused(state):
    with pytest.raises(ValueError, match="none that was saved"):
        TrainFeed(DataLoader(Items()), seed=1).load_state_dict(state)


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


def test_open_reseeds_the_generators():
    dataset = Stream()
    loader = DataLoader(dataset, batch_size=2, collate_fn=list, generator=torch.Generator())
    data = TrainFeed(loader, seed=40)
    assert ids(data.open(2)) == formula(11, 2, seed=40)
    state = torch.Generator().manual_seed(42)
    torch.empty((), dtype=torch.int64).random_(generator=state)
    assert torch.equal(loader.generator.get_state(), state.get_state())


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


def test_any_iterable_is_fed():
    batches = TrainFeed([1, 2, 3], seed=0)
    assert (batches.num_batches, list(batches.open(0)), list(batches.open(1, skip=2))) == (3, [1, 2, 3], [3])
    stream = TrainFeed(iter([1, 2, 3]), seed=0)
    assert (stream.num_batches, list(stream.open(0, skip=1))) == (None, [2, 3])
    assert TrainFeed(DataLoader(Stream(), batch_size=2), seed=0).num_batches is None


def test_unbatched_loaders_are_skipped_by_index():
    dataset = Recorder([5, 6, 7])
    data = TrainFeed(DataLoader(dataset, batch_size=None), seed=0)
    assert list(data.open(0, skip=1)) == [6, 7]


def test_accelerate_loaders_are_fed():
    accelerate = pytest.importorskip("accelerate.data_loader")
    loader = accelerate.prepare_data_loader(
        DataLoader(range(11), 2, shuffle=True, collate_fn=list),
        num_processes=1,
        process_index=0,
        use_seedable_sampler=True,
        data_seed=42,
    )
    data = TrainFeed(loader, seed=42)
    for epoch in (0, 1):
        assert [i for batch in data.open(epoch) for i in batch] == formula(11, epoch)
        assert [i for batch in data.open(epoch, skip=2) for i in batch] == formula(11, epoch)[4:]
