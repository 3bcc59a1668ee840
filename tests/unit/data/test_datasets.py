from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hftrain.data.datasets import num_examples
from hftrain.extras.streams import BatchShardStream, EpochStream


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


class SizedStream(Stream):
    def __len__(self):
        return 7


def test_num_examples_counts_all_ranks_of_a_shared_stream():
    accelerate = pytest.importorskip("accelerate.data_loader")
    stream = EpochStream(SizedStream(), seed=0, rank=0)
    shards = [
        BatchShardStream(stream, batch_size=2, rank=0, world_size=2),
        accelerate.IterableDatasetShard(stream, batch_size=2, num_processes=2, process_index=0),
    ]
    assert [num_examples(DataLoader(shard, batch_size=2)) for shard in shards] == [7, 7]


def test_num_examples_observes_a_list_of_batches():
    assert num_examples([{"x": torch.zeros(3, 2)}, {"x": torch.zeros(1, 2)}]) == 4
    assert num_examples(["text", "text"], batch_size=5) == 10


def test_num_examples_multiplies_batches_where_nothing_else_is_known():
    class Loader:
        batch_size = 4

        def __len__(self):
            return 3

    assert num_examples(Loader()) == 12
    Loader.batch_size = None
    assert num_examples(Loader(), batch_size=2) == 6


def test_num_examples_without_any_length_raises():
    with pytest.raises(TypeError):
        num_examples(DataLoader(Stream()))
