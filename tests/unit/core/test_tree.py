"""Nested batches and outputs."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch

from hftrain.core.tree import batch_size_of


class Pair(NamedTuple):
    left: Any
    right: Any = "kept"


@pytest.mark.parametrize(
    ("tree", "size"),
    [
        (torch.zeros(3, 2), 3),
        (torch.zeros(0, 2), 0),
        (torch.tensor(1.0), None),
        ({"scale": torch.tensor(1.0), "x": torch.zeros(5)}, 5),
        ((None, [], {"text": "abc"}, [torch.zeros(4)]), 4),
        (UserDict(x=torch.zeros(6)), 6),
        (Pair("a", torch.zeros(7)), 7),
        ([{"prompt": "a"}, {"prompt": "b"}], 2),
        ([{"x": torch.zeros(5)}, UserDict(x=torch.zeros(5)), {"x": torch.zeros(4)}], 3),
        ({"labels": [{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(0, 4)}], "pixels": torch.zeros(2, 3)}, 2),
        (({"x": torch.zeros(8)}, {"x": torch.zeros(8)}), 8),
        ({"edges": torch.zeros(2, 9), "x": torch.zeros(9, 3), "node": torch.zeros(9), "labels": torch.zeros(4)}, 4),
        ({"weight": torch.zeros(3), "x": torch.zeros(5, 2), "y": torch.zeros(5)}, 5),
        ({}, None),
        ("abc", None),
        (None, None),
    ],
)
def test_batch_size_is_that_of_the_labels_or_what_most_agree_on(tree: Any, size: int | None) -> None:
    assert batch_size_of(tree) == size
