"""The assembled step: the same numbers as a hand-written loop, and who does what."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hftrain.core.errors import StrategyError
from hftrain.core.types import Owns
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions
from hftrain.step.assemble import assemble_stepper
from hftrain.step.stepper import Stepper
from hftrain.strategies.base import Strategy

CPU = torch.device("cpu")


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


class Engine(Strategy):
    """A strategy whose engine does what `owns` says, and notes it."""

    name = "engine"

    def __init__(self, owns: Owns) -> None:
        super().__init__(CPU)
        self.owns = owns
        self.calls: list[str] = []
        self.launch()

    def backward(self, loss: torch.Tensor) -> None:
        self.calls.append("backward")

    def step(self) -> bool:
        self.calls.append("step")
        return False


def opened(name: str) -> Precision:
    precision = precisions.create(name)
    precision.open(CPU, lambda device: torch.amp.GradScaler(device.type))
    return precision


def assemble(strategy: Strategy, precision: Precision, max_grad_norm: float | None = 1.0) -> Stepper:
    optimizer = make_adamw(make_model())
    return assemble_stepper(strategy=strategy, precision=precision, optimizer=optimizer, max_grad_norm=max_grad_norm)


def test_engine_does_what_it_takes_over() -> None:
    strategy = Engine(Owns.BACKWARD | Owns.STEP | Owns.CLIP | Owns.SCALING | Owns.CASTING)
    stepper = assemble(strategy, opened("fp16"))
    stepper.backward(torch.zeros(()))
    assert stepper.clip() is None
    assert stepper.step() is False
    assert strategy.calls == ["backward", "step"]
    with stepper.autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_clipping_leaves_out_what_it_is_told_to() -> None:
    clipped, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    for parameter in (clipped, other):
        parameter.grad = torch.full((1,), 10.0)
    stepper = assemble_stepper(
        strategy=Engine(Owns.NOTHING),
        precision=opened("fp32"),
        optimizer=torch.optim.SGD([clipped, other]),
        max_grad_norm=1.0,
        unclipped=[other],
    )
    assert stepper.clip() == 10.0
    assert clipped.grad == pytest.approx(1.0, rel=1e-5)
    assert other.grad == 10.0


def test_largest_norm_may_change_from_step_to_step() -> None:
    parameter, args = nn.Parameter(torch.zeros(1)), SimpleNamespace(max_grad_norm=0.0)
    options: dict[str, Any] = {"precision": opened("fp32"), "optimizer": torch.optim.SGD([parameter])}
    stepper = assemble_stepper(strategy=Engine(Owns.NOTHING), **options, args=args)
    found = []
    for args.max_grad_norm in (0.0, 2.0, None, 1.0):
        parameter.grad = torch.full((1,), 10.0)
        found.append((stepper.clip(), round(parameter.grad.item(), 3)))
    assert found == [(None, 10.0), (10.0, 2.0), (None, 10.0), (10.0, 1.0)]


@pytest.mark.parametrize("is_scaled", [False, True])
def test_gradients_of_what_the_optimizer_does_not_hold_are_clipped_and_cleared(is_scaled: bool) -> None:
    trained, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([trained])
    precision = opened("fp16" if is_scaled else "fp32")
    options: dict[str, Any] = {"precision": precision, "optimizer": optimizer, "max_grad_norm": 1.0}
    stepper = assemble_stepper(strategy=Engine(Owns.NOTHING), **options, unheld=[other])
    stepper.backward((3 * trained + 4 * other).sum())
    if is_scaled:
        other.grad = torch.full((1,), 4.0)
    assert stepper.clip() == pytest.approx(3.0 if is_scaled else 5.0)
    assert other.grad == pytest.approx(4.0 if is_scaled else 0.8, rel=1e-5)
    optimizer.add_param_group({"params": [other]})
    stepper.zero_grad()
    assert (trained.grad, other.grad) == (None, None)
    trained.grad, other.grad = torch.full((1,), 3.0), torch.full((1,), 4.0)
    if not is_scaled:
        assert stepper.clip() == pytest.approx(5.0)  # not counted twice


class Bare(Strategy):
    """A strategy that promises more than it has."""

    name = "bare"

    def __init__(self, owns: Owns) -> None:
        super().__init__(CPU)
        self.owns = owns


@pytest.mark.parametrize(
    ("strategy", "precision", "reason"),
    [
        (lambda: Bare(Owns.BACKWARD), "fp32", "has no method 'backward'"),
        (lambda: Bare(Owns.STEP), "fp32", "has no method 'step'"),
        (lambda: Engine(Owns.SCALING), "fp16", "needs its own backward and step"),
        (lambda: Engine(Owns.SCALING | Owns.STEP), "fp16", "needs its own backward and step"),
        (lambda: Engine(Owns.STEP), "fp16", "a precision it bypasses"),
        (lambda: Engine(Owns.BACKWARD | Owns.STEP), "fp16", "a precision it bypasses"),
    ],
)
def test_strategy_that_does_not_hold_together_is_refused(
    strategy: Callable[[], Strategy], precision: str, reason: str
) -> None:
    with pytest.raises(StrategyError, match=reason):
        assemble(strategy(), opened(precision))
