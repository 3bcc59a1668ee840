from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from hftrain.data.datasets import has_length, num_examples
from hftrain.extras.streams import BatchShardStream, EpochStream


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


class SizedStream(Stream):
    def __len__(self):
        return 7


@pytest.mark.parametrize(
    ("obj", "expected"),
    [([1], True), (iter([1]), False), (Stream(), False), (SizedStream(), True), (DataLoader(Stream()), False)],
)
def test_has_length_tells_whether_len_works(obj, expected):
    assert has_length(obj) is expected


def test_num_examples_reads_the_dataset():
    assert num_examples(DataLoader(range(7), batch_size=3)) == 7
    assert num_examples(DataLoader(range(7), batch_sampler=BatchSampler(SequentialSampler(range(7)), 3, True))) == 7


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
