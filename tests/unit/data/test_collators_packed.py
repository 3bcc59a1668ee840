from __future__ import annotations

import numpy
import pytest

from hftrain import ConfigError
from hftrain.data.collators_packed import DataCollatorWithFlattening


def test_samples_are_kept_apart_by_positions_and_bounds():
    rows = [{"input_ids": numpy.array([5, 6]), "labels": numpy.array([7, 8])}, {"input_ids": [9], "labels": [3]}]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    assert batch["position_ids"].tolist() == [[0, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 8, -100]]
    assert rows[0]["labels"].tolist() == [7, 8]
    assert (batch["cu_seq_lens_q"].tolist(), batch["max_length_k"]) == ([0, 2, 3], 2)
    assert batch["seq_idx"].tolist() == [[0, 0, 1]]


def test_unknown_kind_of_tensors_is_refused():
    with pytest.raises(ConfigError, match="'tf'"):
        DataCollatorWithFlattening(return_tensors="tf")([{"input_ids": [1]}])
