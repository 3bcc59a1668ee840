from __future__ import annotations

import logging

import pytest
import torch

from hftrain.core.errors import ConfigError
from hftrain.data.columns import RemoveColumnsCollator, prune_columns, signature_columns


class Net(torch.nn.Module):
    def forward(self, x, mask=None, labels=None):
        return x


class AnyNet(torch.nn.Module):
    def forward(self, x, **kwargs):
        return x


class Adapter(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def get_base_model(self):
        return self.base

    def forward(self, *args, **kwargs):
        return self.base(*args, **kwargs)


class Table:
    """Has of a `datasets.Dataset` what pruning uses; the real one is in the interop tests."""

    def __init__(self, names, format_type=None):
        self.column_names = names
        self.format = {"type": format_type}

    def remove_columns(self, names):
        return Table([name for name in self.column_names if name not in names])


def with_config(model):
    model.config = object()
    return model


def bare():
    return torch.nn.Module()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Net(), ["x", "mask", "labels", "label", "label_ids"]),
        (Adapter(Net()), ["x", "mask", "labels", "label", "label_ids"]),
        (torch.compile(Net(), backend="eager"), ["x", "mask", "labels", "label", "label_ids"]),
        (with_config(AnyNet()), ["x", "labels", "label", "label_ids"]),
        (AnyNet(), None),
        (with_config(bare()), None),
    ],
)
def test_signature_columns_follow_forward(model, expected):
    assert signature_columns(model, label_names=["labels"]) == expected


def test_signature_columns_keep_all_for_an_unreadable_signature():
    class Opaque(torch.nn.Module):
        forward = max

    assert signature_columns(Opaque(), label_names=[]) is None


def test_prune_columns_with_nothing_left_raises():
    with pytest.raises(ConfigError, match=r"columns=\['a', 'b'\], signature=\['x'\]"):
        prune_columns(Table(["a", "b"]), keep=["x"], model_name="Net", description="training")


def test_pruner_with_nothing_left_raises():
    pruner = RemoveColumnsCollator(list, ["x"], logging.getLogger("hftrain"), "Net", description="training")
    with pytest.raises(ConfigError, match=r"Net\.forward takes none"):
        pruner([{"a": 1}])
