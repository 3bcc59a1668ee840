"""The rules that turn a model's outputs into a loss."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any

import pytest
import torch

from hftrain.core.errors import TaskError
from hftrain.task.loss import read_loss, smoothed_loss

loss = torch.tensor(2.0)
logits = torch.zeros(4, 3)


@pytest.mark.parametrize(
    "outputs",
    [
        {"loss": loss, "logits": logits},
        OrderedDict(logits=logits, loss=loss),
        UserDict(loss=loss),
        (loss, logits),
        [loss],
        loss,
    ],
)
def test_loss_is_found(outputs: Any) -> None:
    assert read_loss(outputs, model_name="Net") is loss


@pytest.mark.parametrize(
    ("outputs", "named"),
    [
        ({"logits": logits, "aux": 1}, r"logits float32 \(4, 3\), aux int"),
        ({}, "empty"),
        ({"loss": None}, "loss None"),
        ({"loss": logits}, r"loss float32 \(4, 3\)"),
        ((logits, loss), r"tuple of \(float32 \(4, 3\), float32 \(\)\)"),
        ([], "list of 0"),
        ([2.0, None], "list of 2"),
        (None, "It returned None"),
        (torch.zeros(1), r"float32 \(1,\)"),
        ("text", "str"),
    ],
)
def test_outputs_without_a_loss_are_named(outputs: Any, named: str) -> None:
    with pytest.raises(TaskError, match=f"the loss of Net.*{named}, with no scalar loss.*compute_loss_func"):
        read_loss(outputs, model_name="Net")


def test_smoothed_loss_without_any_label_is_nan_as_torchs_is() -> None:
    labels = torch.full((4,), -100)
    assert smoothed_loss(logits, labels, smoothing=0.1).isnan()
    assert smoothed_loss(logits, labels, smoothing=0.1, num_items=8) == 0


def test_labels_that_are_no_classes_cannot_be_smoothed() -> None:
    with pytest.raises(TaskError, match=r"not class numbers but torch.float32, of shape \(4, 3\)"):
        smoothed_loss(logits, torch.zeros(4, 3), smoothing=0.1)
