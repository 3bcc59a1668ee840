"""The class users subclass."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_rows
from torch import nn
from torchmetrics import MeanMetric

from hftrain import TaskError, TaskModule

batch = {
    "x": torch.stack([row["x"] for row in make_rows(4)]),
    "labels": torch.stack([row["labels"] for row in make_rows(4)]),
}


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"x": torch.zeros(3, 2), "labels": torch.tensor([1, -100, 0])}, 2),
        (UserDict(labels=torch.full((2, 4), -100)), 0),
        ({"x": torch.zeros(3, 2), "labels": torch.zeros(3)}, 3),
        ({"x": torch.zeros(3, 2), "labels": [1, 2, 3]}, 3),
        ({"x": torch.zeros(3, 2)}, 3),
        ((torch.zeros(5, 2), torch.zeros(5)), 5),
        (torch.zeros(6), 6),
    ],
)
def test_items_are_labels_that_count_else_samples(batch: Any, count: int) -> None:
    assert int(TaskModule(Net()).count_items(batch)) == count


def test_item_count_stays_on_the_device() -> None:
    assert isinstance(TaskModule(Net()).count_items({"labels": torch.zeros(2, dtype=torch.int64)}), torch.Tensor)


@pytest.mark.parametrize("batch", [["a", "b"], {"scale": torch.tensor(1.0)}, None])
def test_batch_without_rows_cannot_be_counted(batch: Any) -> None:
    with pytest.raises(TaskError, match=rf"a batch of type {type(batch).__name__}\. .*Override count_items"):
        TaskModule(Net()).count_items(batch)


def test_metrics_are_the_children_that_follow_the_protocol() -> None:
    class Measured(Task):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()
            self.helper = nn.Linear(1, 1)

    task = Measured()
    assert list(task.metrics("eval")) == list(task.metrics("test")) == ["mean"]
    assert task.metrics("train") == {}
