"""What every precision promises: opening, closing, and the calls of a step."""

from __future__ import annotations

import pytest
import torch

from hftrain.core.errors import ConfigError
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions

CPU = torch.device("cpu")


def make_scaler(device: torch.device) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device.type)


def opened(name: str) -> Precision:
    precision = precisions.create(name)
    precision.open(CPU, make_scaler)
    return precision


@pytest.mark.parametrize(
    ("name", "compute_dtype", "loss_scaling", "autocast", "matmul"),
    [
        ("fp32", torch.float32, False, False, None),
        ("tf32", torch.float32, False, False, "high"),
        ("bf16", torch.bfloat16, False, True, None),
        ("fp16", torch.float16, True, True, None),
    ],
)
def test_policy_says_what_a_strategy_may_know(
    name: str, compute_dtype: torch.dtype, loss_scaling: bool, autocast: bool, matmul: str | None
) -> None:
    policy = precisions.create(name).policy
    assert (policy.compute_dtype, policy.loss_scaling) == (compute_dtype, loss_scaling)
    assert (policy.autocast, policy.matmul) == (autocast, matmul)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.float32, torch.float32)


def test_open_on_a_second_device_is_refused() -> None:
    precision = opened("fp32")
    with pytest.raises(ConfigError, match="It is open on 'cpu'"):
        precision.open(torch.device("meta"), make_scaler)
    precision.close()
    precision.open(torch.device("meta"), make_scaler)


def test_unknown_matmul_is_refused() -> None:
    with pytest.raises(ConfigError, match="'medium'"):
        precisions.create("fp32", matmul="medium")


def test_scaler_state_without_a_scaler_is_reported() -> None:
    precision = opened("bf16")
    with pytest.warns(UserWarning, match="no use with precision='bf16'"):
        precision.load_state_dict({"scale": 2.0})
    precision.load_state_dict({})
    assert precision.state_dict() == {}
