from __future__ import annotations

import numpy
import pytest
import torch

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from hftrain.core.errors import ConfigError  # noqa: E402
from hftrain.extras.grouping import LengthConfig, LengthShuffledSampler, sample_lengths  # noqa: E402

pytestmark = pytest.mark.interop


def test_lengths_of_a_table_are_read_from_its_columns():
    table = datasets.Dataset.from_dict({"input_ids": [[1], [1, 2, 3], [1, 2]], "length": [7, 8, 9], "text": ["a"] * 3})
    table = table.select([2, 0, 1])
    assert sample_lengths(table, LengthConfig(column="length")).tolist() == [9, 7, 8]
    assert sample_lengths(table, LengthConfig(column="absent")).tolist() == [2, 1, 3]
    assert sample_lengths(table.with_format("torch"), LengthConfig()).tolist() == [2, 1, 3]
    assert sample_lengths(table, LengthConfig(input_name="text")).tolist() == [1, 1, 1]
    made = table.with_transform(lambda rows: {"input_ids": [[0] * 5] * len(rows["text"])})
    assert sample_lengths(made, LengthConfig()).tolist() == [5, 5, 5]
    with pytest.raises(ConfigError, match="whole number"):
        sample_lengths(table, LengthConfig(column="text"))


def test_grouped_order_is_that_of_transformers():
    lengths = numpy.random.default_rng(0).integers(1, 300, 517).tolist()
    theirs = transformers.trainer_pt_utils.get_length_grouped_indices(
        lengths, 8, generator=torch.Generator().manual_seed(5)
    )
    assert list(LengthShuffledSampler(lengths, batch_size=8, seed=5)) == theirs
