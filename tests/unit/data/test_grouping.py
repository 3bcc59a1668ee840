from __future__ import annotations

import itertools

import numpy
import pytest
import torch
from support.loading import build
from support.tiny import Stream

from hftrain.core.errors import ConfigError
from hftrain.data.feed import TrainFeed
from hftrain.data.samplers import reading_order
from hftrain.extras.grouping import (
    LengthConfig,
    LengthShuffledSampler,
    check_lengths,
    length_sampler,
    sample_lengths,
)

LENGTHS = numpy.random.default_rng(0).integers(1, 500, 1003)


def padded_share(order, size):
    """Return how much longer batches are when padded."""
    batches = [LENGTHS[order[i : i + size]] for i in range(0, len(order), size)]
    return sum(batch.max() * len(batch) for batch in batches) / LENGTHS.sum()


@pytest.mark.parametrize("shuffles", [False, True])
def test_batches_hold_similar_lengths_and_every_sample_once(shuffles):
    sampler = LengthShuffledSampler(LENGTHS, batch_size=8, seed=3, shuffles_batches=shuffles)
    order = list(sampler)
    assert sorted(order) == list(range(len(sampler)))
    assert padded_share(order, 8) < 1.1 < 1.6 < padded_share(list(range(1003)), 8)
    assert LENGTHS[order[0]] == LENGTHS.max()


def test_sortish_order_has_no_run_from_long_to_short():
    longest = []
    for shuffles in (False, True):
        order = list(LengthShuffledSampler(LENGTHS, batch_size=8, seed=3, shuffles_batches=shuffles))
        longest.append([LENGTHS[order[i : i + 8]].max() for i in range(0, 320, 8)])
    falls = [sum(a >= b for a, b in itertools.pairwise(each)) for each in longest]
    assert falls[0] > 35 > 30 > falls[1]


def test_lengths_are_those_of_the_input():
    rows = [{"input_ids": [0] * n, "input_values": torch.zeros(n + 1)} for n in (3, 1, 2)]
    before = torch.get_rng_state()
    assert sample_lengths(rows, LengthConfig()).tolist() == [3, 1, 2]
    assert sample_lengths(rows, LengthConfig(input_name="input_values", column="length")).tolist() == [4, 2, 3]
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Stream([]), "own order"),
        ([{"x": [1]}], r"'input_ids' with a length \(there are x\)"),
        ([{"input_ids": 3}], "'input_ids' with a length"),
        ([(1, 2)], "'input_ids' with a length"),
    ],
)
def test_data_without_lengths_is_refused(dataset, message):
    for function in (check_lengths, sample_lengths):
        with pytest.raises(ConfigError, match=message):
            function(dataset, LengthConfig())


def rows():
    return [{"input_ids": [i] * int(LENGTHS[i])} for i in range(101)]


def read(batches):
    return [[row["input_ids"][0] for row in batch] for batch in batches]


@pytest.mark.parametrize("shuffles", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_grouped_training_is_resumed_and_shared_out(shuffles, num_workers):
    def feed(rank, world_size):
        config = LengthConfig(batch_size=4, shuffles_batches=shuffles)
        sampler = length_sampler(rows(), config, is_training=True)
        place = {"rank": rank, "world_size": world_size}
        return TrainFeed(build(rows(), batch_size=2, num_workers=num_workers, sampler=sampler, **place), seed=42)

    shares = [read(feed(rank, 2).open(1)) for rank in (0, 1)]
    assert [read(feed(rank, 2).open(1, skip=3)) for rank in (0, 1)] == [share[3:] for share in shares]
    together = [batch for pair in zip(*shares, strict=True) for batch in pair]
    # The last round is filled up from the start.
    assert [together[i] for i in range(50)] == read(feed(0, 1).open(1))[:50]
    assert {i for batch in together for i in batch} == set(range(101))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_sorted_evaluation_knows_the_places_of_its_samples(world_size, drop_last):
    seen, orders = [], []
    for rank in range(world_size):
        unit = 4 if drop_last else 1
        sampler = length_sampler(rows(), LengthConfig(), is_training=False, world_size=world_size, unit=unit)
        place = {"rank": rank, "world_size": world_size, "is_training": False}
        loader = build(rows(), batch_size=4, drop_last=drop_last, sampler=sampler, **place)
        batches = read(loader)
        share = [i for batch in batches for i in batch]
        assert LENGTHS[share].tolist() == sorted(LENGTHS[share].tolist(), reverse=True)
        seen += share
        orders.append(reading_order(loader).tolist())
    assert orders == [seen] * world_size
    assert len(seen) == (100 if drop_last else 101)
