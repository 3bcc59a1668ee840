"""What every strategy promises, seen on one process."""

from __future__ import annotations

from collections import UserDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from hftrain.precision.registry import precisions
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import create_strategy

POLICY = precisions.create("fp32").policy
Pair = namedtuple("Pair", "first second")


class Batch(UserDict):
    """A mapping with a `to` of its own, as tokenizers return."""


class Graph:
    """No container, but it can move."""

    def to(self, device: torch.device) -> str:
        return f"moved to {device}"


@pytest.fixture
def strategy() -> Strategy:
    strategy = create_strategy("single", use_cpu=True)
    strategy.launch()
    return strategy


@pytest.fixture
def meta() -> Strategy:
    """A strategy on the meta device, where a tensor that was moved can be told from one that was not."""
    strategy = create_strategy("single", device="meta")
    strategy.launch()
    return strategy


def test_to_device_keeps_containers_and_other_leaves(meta: Strategy) -> None:
    tensor = torch.ones(2)
    moved = meta.to_device({"a": tensor, "b": [tensor, (tensor, "text")], "c": Pair(tensor, 1)})
    assert moved["a"].is_meta
    assert moved["b"][0].is_meta
    assert moved["b"][1][1] == "text"
    assert isinstance(moved["c"], Pair)
    assert moved["c"].first.is_meta
    assert not tensor.is_meta


def test_to_device_moves_what_moves_itself(meta: Strategy, strategy: Strategy) -> None:
    assert meta.to_device(Graph()) == "moved to meta"
    batch = meta.to_device(Batch(a=torch.ones(2)))
    assert isinstance(batch, Batch)
    assert batch["a"].is_meta
    assert isinstance(strategy.to_device(pack_sequence([torch.ones(2)])), PackedSequence)
    assert meta.to_device(torch.ones(1)).is_meta
    assert meta.to_device(SimpleNamespace(a=1)).a == 1


@pytest.mark.interop
def test_to_device_keeps_a_batch_encoding(meta: Strategy) -> None:
    from transformers import BatchEncoding

    batch = meta.to_device(BatchEncoding({"input_ids": torch.ones(2)}))
    assert isinstance(batch, BatchEncoding)
    assert batch["input_ids"].is_meta


def test_place_model_false_leaves_the_model_where_it_is() -> None:
    strategy = create_strategy("single", device="meta", place_model=False)
    strategy.launch()
    assert not strategy.setup(nn.Linear(2, 2), None, POLICY)[0].weight.is_meta
