"""A `TensorDataset` is read by whole batches; `datasets` and whatever is a user's are in the interop tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.loading import build
from torch.utils.data import Subset, TensorDataset

from hftrain.data.collators import default_data_collator


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(8, -1, -1))])
def test_batches_are_those_of_the_rows(wrap: Any, monkeypatch: Any) -> None:
    dataset = wrap(TensorDataset(torch.randn(9, 2, 3), torch.arange(9), torch.arange(9) > 4))
    expected = [default_data_collator([dataset[i] for i in range(at, min(at + 4, 9))]) for at in (0, 4, 8)]
    monkeypatch.delattr(TensorDataset, "__getitem__")
    batches = list(build(dataset, collate=default_data_collator, batch_size=4, shuffle=False))
    for batch, rows in zip(batches, expected, strict=True):
        assert [part.dtype for part in batch] == [part.dtype for part in rows]
        assert all(map(torch.equal, batch, rows))


def test_a_users_class_is_asked_for_each_sample() -> None:
    asked: list[int] = []

    class Own(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            asked.append(index)
            return super().__getitem__(index)

    list(build(Own(torch.arange(9)), collate=default_data_collator, batch_size=4, shuffle=False))
    assert asked == list(range(9))
