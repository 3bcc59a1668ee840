"""Mixed precision: where operations run, what an overflow does, what a checkpoint holds."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import pytest
import torch
from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions

CPU = torch.device("cpu")


def opened(name: str, **scaler: Any) -> Precision:
    precision = precisions.create(name)
    precision.open(CPU, lambda device: torch.amp.GradScaler(device.type, **scaler))
    return precision


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_autocast_inside_itself_leaves_casting_off_afterwards(name: str) -> None:
    precision = opened(name)
    with precision.autocast(), precision.autocast():
        pass
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_backward_is_one_frame_above_torch(name: str) -> None:
    precision, frames = opened(name), []

    class Loss(torch.Tensor):
        def backward(self, *args: Any, **kwargs: Any) -> None:
            frames.append([frame.name for frame in traceback.extract_stack(sys._getframe(1), limit=2)])

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    precision.backward(torch.ones(()).as_subclass(Loss))
    assert frames == [["test_backward_is_one_frame_above_torch", "backward"]]


def overflow_run(
    precision: Precision, *, at: int, steps: int = 4
) -> tuple[list[bool], list[torch.Tensor], list[float]]:
    """Take `steps` steps whose gradients overflow in step `at`; return what happened."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    done, weights, scales = [], [], []
    for index in range(steps):
        precision.backward((weight * (float("inf") if index == at else 1.0)).sum())
        done.append(precision.step(optimizer))
        optimizer.zero_grad()
        weights.append(weight.detach().clone())
        scales.append(precision.state_dict()["scale"])
    return done, weights, scales


def test_steps_are_skipped_and_counted_however_low_the_scale_is() -> None:
    precision, weight = opened("fp16", init_scale=4.0), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def step() -> bool:
        precision.backward((weight * float("nan")).sum())
        done = precision.step(optimizer)
        optimizer.zero_grad()
        return done

    with pytest.warns(UserWarning, match="although the loss scale has come down to 1"):
        done = [step() for _ in range(160)]  # halving reaches 0 after 152 of them
    assert not any(done)
    assert precision.logs() == {"loss_scale": 0.0, "skipped_steps": 160}
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("fused", [False, True])
def test_logged_scale_is_the_scalers_though_it_is_seldom_read(fused: bool) -> None:
    precision, weight = opened("fp16", init_scale=256.0, growth_interval=3), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=fused)
    overflows = [False, False, True, False, False, False, False, True, True, *[False] * 7]
    done, logged, scales = [], [], []
    for step, is_overflow in enumerate(overflows):
        if step == 12:  # in the middle of a row
            state = precision.state_dict()
            precision = opened("fp16")
            precision.load_state_dict(state)
        precision.backward((weight * (float("inf") if is_overflow else 1.0)).sum())
        done.append(precision.step(optimizer))
        optimizer.zero_grad()
        logged.append(precision.logs()["loss_scale"])
        scales.append(precision.state_dict()["scale"])
    assert done == [not each for each in overflows]
    assert logged == scales
    assert logged[-1] == 256.0 / 2 * 2 / 2 / 2 * 2 * 2


def test_scaler_state_survives_a_resume() -> None:
    first = opened("fp16", init_scale=256.0)
    overflow_run(first, at=1)
    second = opened("fp16")
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    # The restored scale is what a later step is compared with.
    assert overflow_run(second, at=1)[0] == [True, False, True, True]


def test_missing_scaler_state_keeps_the_fresh_scale() -> None:
    precision = opened("fp16", init_scale=256.0)
    precision.load_state_dict({})
    assert precision.state_dict()["scale"] == 256.0


def test_trainable_float16_parameters_are_refused_by_fp16() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(ConfigError, match=r"'1.weight' is float16"):
        precisions.create("fp16").convert(model)
    model[1].requires_grad_(False)
    assert precisions.create("fp16").convert(model) is model
