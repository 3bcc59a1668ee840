"""Where optimizers that update during the backward pass can work."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.core.types import Owns
from hftrain.optim.extras.in_backward import LayerWise
from hftrain.precision.registry import precisions
from hftrain.step.assemble import assemble_stepper
from hftrain.step.legality import check_in_backward
from hftrain.strategies.registry import create_strategy


class LayerWiseSGD(LayerWise, torch.optim.SGD):
    """What a layer-wise handler makes of a class."""


def check(optimizer: Any, *, ranks: int = 1, accumulation: int = 1, precision: str = "fp32", owns: Any = None) -> None:
    strategy: Any = SimpleNamespace(world_size=ranks, owns=owns or Owns.NOTHING, name="engine")
    check_in_backward(optimizer, strategy=strategy, precision=precisions.create(precision), accumulation=accumulation)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"ranks": 2}, "2 processes would have to average"),
        ({"accumulation": 3}, "gradient_accumulation_steps=3 would have to add"),
        ({"precision": "fp16"}, "precision='fp16' would have to unscale"),
        ({"owns": Owns.BACKWARD | Owns.STEP}, "strategy='engine' runs the backward"),
    ],
)
def test_check_in_backward_refuses(setting: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"Cannot use LayerWiseSGD.*{reason}"):
        check(LayerWiseSGD, **setting)


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, LayerWiseSGD([nn.Parameter(torch.ones(1))], lr=0.1)])
def test_check_in_backward_passes(optimizer: Any) -> None:
    check(optimizer)


def test_stepper_updates_in_backward(caplog: pytest.LogCaptureFixture) -> None:
    strategy, precision = create_strategy("single", use_cpu=True), precisions.create("fp32")
    strategy.launch()
    weight = nn.Parameter(torch.ones(1))
    optimizer = LayerWiseSGD([weight], lr=0.5)
    with caplog.at_level(logging.WARNING, logger="hftrain"):
        stepper = assemble_stepper(strategy=strategy, precision=precision, optimizer=optimizer, max_grad_norm=1.0)
    assert "max_grad_norm=1.0 has no effect with LayerWiseSGD" in caplog.text
    stepper.backward((weight * 3).sum())
    assert weight.item() == -0.5
    assert stepper.clip() is None
    assert stepper.step()
    assert weight.item() == -0.5
    strategy.close()
