from __future__ import annotations

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import (
    BatchSampler,
    SequentialSampler,
)

from hftrain.core.errors import ConfigError
from hftrain.data.samplers import (
    ContiguousShard,
    RankBatches,
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
