"""Nested batches and outputs."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from hftrain.core.tree import batch_size_of, detach, map_tensors


class Pair(NamedTuple):
    left: Any
    right: Any = "kept"


class Output(OrderedDict[str, Any]):
    """Like transformers' `ModelOutput`: takes a dict, and leaves None out."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        super().__init__((key, value) for key, value in items.items() if value is not None)


class Closed(Mapping[str, Any]):
    """A mapping that cannot be made of a dict."""

    def __init__(self, a: Any, *, b: Any) -> None:
        self._items = {"a": a, "b": b}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return 2


Point = namedtuple("Point", "x y")
one = torch.ones(2)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": one, "b": 3},
        [one, "text", None],
        (one, 2.0),
        Pair(one),
        Point(one, one),
        Output({"loss": one, "logits": one, "aux": None}),
        UserDict({"a": one}),
        OrderedDict(a=one),
    ],
)
def test_map_keeps_the_containers_type_and_other_leaves(tree: Any) -> None:
    doubled = map_tensors(tree, lambda tensor: tensor * 2)
    assert type(doubled) is type(tree)
    pairs = zip(*(t.values() if isinstance(t, Mapping) else t for t in (tree, doubled)), strict=True)
    for before, after in pairs:
        if isinstance(before, torch.Tensor):
            assert torch.equal(after, before * 2)
        else:
            assert after is before


def test_map_goes_all_the_way_down_and_copies_containers() -> None:
    tree = {"a": [Pair((one, {"b": one}))], "n": None}
    mapped = map_tensors(tree, lambda tensor: tensor.shape[0])
    assert mapped == {"a": [Pair((2, {"b": 2}))], "n": None}
    assert tree["a"][0].left[0] is one


@pytest.mark.parametrize("tree", [Closed(one, b=4), defaultdict(list, a=one, b=4)])
def test_mapping_that_takes_no_dict_becomes_one(tree: Any) -> None:
    assert map_tensors(tree, torch.Tensor.numel) == {"a": 2, "b": 4}


@pytest.mark.parametrize("tree", ["text", 3, None, b"bytes"])
def test_other_leaves_are_given_back(tree: Any) -> None:
    assert map_tensors(tree, torch.Tensor.numel) is tree


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


def test_detach_cuts_the_graph_and_shares_memory() -> None:
    weight = torch.ones(2, requires_grad=True)
    cut = detach({"a": (weight * 1, weight), "b": 1})
    assert not any(tensor.requires_grad for tensor in cut["a"])
    assert cut["a"][1].data_ptr() == weight.data_ptr()


def test_map_visits_a_packed_sequence_as_it_is() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    seen: list[torch.Tensor] = []
    visited = map_tensors(packed, seen.append)
    assert type(visited) is type(packed)
    assert [tensor.tolist() for tensor in seen] == [packed.data.tolist(), packed.batch_sizes.tolist()]
