from __future__ import annotations

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from hftrain.core.errors import ConfigError
from hftrain.data.samplers import (
    ContiguousShard,
    GlobalShuffleSampler,
    RankBatches,
    give_generator,
    is_rank_aware,
    samplers_of,
)


def test_contiguous_shard_without_length_raises():
    with pytest.raises(ConfigError, match="__len__"):
        ContiguousShard(iter([1]), rank=0, world_size=2)


class OfAnySize(list):
    """Batches that tell no size."""


@pytest.mark.parametrize("options", [{}, {"even_batches": False}], ids=str)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rank_batches_are_those_of_accelerate(world_size, drop_last, options):
    sources = [BatchSampler(SequentialSampler(range(n)), 2, drop_last) for n in range(17)]
    sources += [OfAnySize([[i] * (1 + i % 3) for i in range(n)]) for n in range(9)]
    for source in sources:
        for rank in range(world_size):
            place = {"num_processes": world_size, "process_index": rank, **options}
            ours, theirs = RankBatches(source, **place), BatchSamplerShard(source, **place)
            assert (list(ours), len(ours)) == (list(theirs), len(theirs))


class Ragged(list):
    """Batches of which some are smaller than they say."""

    batch_size = 2
    drop_last = False


@pytest.mark.parametrize("even_batches", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_small_batches_in_the_middle_are_handed_out(world_size, even_batches):
    source = Ragged([[0, 1], [2], [3, 4], [5], [6], [7, 8], [9, 10]])
    shares = [
        RankBatches(source, num_processes=world_size, process_index=rank, even_batches=even_batches)
        for rank in range(world_size)
    ]
    assert {sample for share in shares for batch in share for sample in batch} == set(range(11))
    assert [len(list(share)) for share in shares] == list(map(len, shares))


def test_samplers_of_lists_each_part_once():
    sampler = RandomSampler(range(4))
    loader = DataLoader(range(4), batch_size=2, sampler=sampler)
    assert samplers_of(loader) == [loader.batch_sampler, sampler]
    assert samplers_of([1, 2]) == []


@pytest.mark.parametrize("kind", [RandomSampler, SubsetRandomSampler])
def test_give_generator_makes_ranks_agree(kind):
    orders = []
    for _ in range(2):
        sampler = kind(range(20))
        give_generator(BatchSampler(sampler, 2, False), seed=7)
        orders.append(list(sampler))
    assert orders[0] == orders[1]


def test_give_generator_leaves_other_samplers_alone():
    own = torch.Generator()
    sampler = RandomSampler(range(4), generator=own)
    global_one, plain = GlobalShuffleSampler(range(4)), SequentialSampler(range(4))
    for part in (sampler, global_one, plain):
        give_generator(part, seed=0)
    assert sampler.generator is own
    assert global_one.generator is None
    assert not hasattr(plain, "generator")


def test_is_rank_aware_knows_distributed_samplers():
    assert is_rank_aware(DistributedSampler(range(4), num_replicas=2, rank=0))
    assert not is_rank_aware(DistributedSampler(range(4), num_replicas=1, rank=0))
    assert not is_rank_aware(SequentialSampler(range(4)))
