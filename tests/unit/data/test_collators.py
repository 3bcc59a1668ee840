from __future__ import annotations

import pickle
from collections import namedtuple
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

from hftrain.core.errors import ConfigError, TaskError
from hftrain.data.collators import (
    DataCollatorWithPadding,
    DefaultDataCollator,
    default_data_collator,
)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0, 2], torch.int64),
        ([0.5, 1.0], torch.float32),
        ([1, 2.5], torch.float32),
        ([True, False], torch.int64),
        ([numpy.int32(1), numpy.int32(2)], torch.int64),
        ([numpy.float64(1), numpy.float64(2)], torch.float32),
        ([torch.tensor(1), torch.tensor(2)], torch.int64),
        ([torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.bfloat16)], torch.float32),
    ],
)
def test_label_becomes_labels_of_its_kind(values, dtype):
    batch = default_data_collator([{"label": value} for value in values])
    assert set(batch) == {"labels"}
    assert batch["labels"].dtype is dtype
    assert batch["labels"].tolist() == [float(value) for value in values]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([[0, 1], [2, 3]], torch.int64),
        ([[0.0], [1.0]], torch.float32),
        ([torch.tensor([1.0, 2.0], dtype=torch.float64)] * 2, torch.float64),
        ([numpy.array([1, 2])] * 2, torch.int64),
    ],
)
def test_label_ids_become_labels(values, dtype):
    labels = default_data_collator([{"label_ids": value, "label": None} for value in values])["labels"]
    assert labels.dtype is dtype
    assert labels.shape[0] == 2


def test_other_parts_are_stacked_and_texts_left_out():
    features = [
        {"tensor": torch.ones(3), "array": numpy.zeros((2, 2), dtype=numpy.float32), "list": [1, 2], "number": 1.5}
        | {"text": "a", "nothing": None, "scalar": numpy.int64(4)}
    ] * 2
    batch = default_data_collator(features)
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in batch.items()}
    assert shapes == {
        "tensor": ((2, 3), torch.float32),
        "array": ((2, 2, 2), torch.float32),
        "list": ((2, 2), torch.int64),
        "number": ((2,), torch.float32),
        "scalar": ((2,), torch.int64),
    }


def test_objects_are_read_by_their_attributes():
    @dataclass
    class Sample:
        x: list[int]
        label: int
        text: str = "a"

    batch = default_data_collator([Sample([1, 2], 0), Sample([3, 4], 1)])
    assert {name: value.tolist() for name, value in batch.items()} == {"x": [[1, 2], [3, 4]], "labels": [0, 1]}


def test_samples_without_names_are_stacked_place_by_place():
    x, y = default_data_collator(list(TensorDataset(torch.arange(4.0).view(2, 2), torch.tensor([0, 1]))))
    assert x.tolist() == [[0, 1], [2, 3]]
    assert y.tolist() == [0, 1]
    assert default_data_collator([torch.ones(2), torch.ones(2)]).shape == (2, 2)
    assert default_data_collator([1, 2]).tolist() == [1, 2]
    pair = namedtuple("pair", "a b")
    assert default_data_collator([pair(1, 2), pair(3, 4)]).b.tolist() == [2, 4]


@pytest.mark.parametrize(
    "features",
    [
        [{"input_ids": [1, 2]}, {"input_ids": [1]}],
        [{"input_ids": torch.ones(2)}, {"input_ids": torch.ones(3)}],
        [{"input_ids": [1], "extra": 0}, {"input_ids": [1]}],
        [{"label_ids": [1, 2]}, {"label_ids": [1]}],
        [{"words": ["a"]}, {"words": ["b"]}],
    ],
)
def test_parts_that_cannot_be_stacked_are_named(features):
    with pytest.raises(TaskError, match=r"input_ids|extra|label_ids|words"):
        default_data_collator(features)


def test_numpy_batches_and_unknown_kinds():
    batch = default_data_collator([{"x": [1.0], "label": 1}], return_tensors="np")
    assert isinstance(batch["x"], numpy.ndarray)
    assert DefaultDataCollator()([{"label": 1}])["labels"].tolist() == [1]
    assert isinstance(DefaultDataCollator("np")([{"label": 1}])["labels"], numpy.ndarray)
    assert isinstance(DefaultDataCollator("np")([{"label": 1}], return_tensors="pt")["labels"], torch.Tensor)
    with pytest.raises(ConfigError, match="return_tensors='tf'"):
        default_data_collator([{"x": 1}], return_tensors="tf")


class Padder:
    def pad(self, features, *, padding, max_length, pad_to_multiple_of, return_tensors):
        assert (padding, return_tensors) == (True, "pt")
        length = max_length or max(len(feature["input_ids"]) for feature in features)
        ids = [feature["input_ids"] + [0] * (length - len(feature["input_ids"])) for feature in features]
        others = {name: torch.tensor([f[name] for f in features]) for name in features[0] if name != "input_ids"}
        return {"input_ids": torch.tensor(ids), **others}


@pytest.mark.parametrize("name", ["label", "label_ids", "labels"])
def test_padding_collator_pads_and_renames_labels(name):
    collate = pickle.loads(pickle.dumps(DataCollatorWithPadding(Padder(), max_length=4)))
    batch = collate([{"input_ids": [1, 2], name: 0}, {"input_ids": [3], name: 1}])
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0], [3, 0, 0, 0]]
    assert batch["labels"].tolist() == [0, 1]
    assert set(batch) == {"input_ids", "labels"}


@pytest.mark.parametrize("first", [1, 1.5, True, 2**40, 1e300, None])
@pytest.mark.parametrize("second", [2, -2.25, False, 2**63])
def test_rows_of_numbers_are_those_of_torch(first: object, second: object) -> None:
    rows = [[first, 3], [4, second]]
    try:
        expected = torch.tensor(rows)
    except (TypeError, ValueError, RuntimeError):
        with pytest.raises(TaskError):
            default_data_collator([{"x": row} for row in rows])
    else:
        found = default_data_collator([{"x": row} for row in rows])["x"]
        assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())
