"""An `Engine` with DeepSpeed: the same loop, the same guarantees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.engines import check_that_it_equals_one_process_and_resumes, make_optimizer
from support.tiny import Net

from hftrain import ConfigError, Engine
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.deepspeed


@pytest.mark.parametrize("strategy", ["deepspeed", "deepspeed_stage_2"])
def test_training_equals_one_process_and_resumes(run_distributed: Callable[..., list[Any]], strategy: str) -> None:
    check_that_it_equals_one_process_and_resumes(run_distributed, strategy)


def misuse() -> list[str]:
    with Engine(strategy=create_strategy("deepspeed", use_cpu=True), max_grad_norm=1.0) as engine:
        engine.setup(Net(), make_optimizer)
        with pytest.raises(ConfigError) as caught:
            engine.clip(0.5)
        return [str(caught.value)]


def test_another_norm_is_refused(run_distributed: Callable[..., list[Any]]) -> None:
    assert "Pass Engine(max_grad_norm=0.5)" in run_distributed(misuse)[0][0]


def read_weights(stage: int) -> list[bool]:
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    with Engine(strategy=create_strategy("deepspeed", use_cpu=True, config=config)) as engine:
        net = Net()
        expected = {name: value.clone() for name, value in net.state_dict().items()}
        engine.setup(net, make_optimizer)
        found = dict(engine.weights())
        return [list(found) == list(expected), all(torch.equal(found[name], expected[name]) for name in expected)]


@pytest.mark.parametrize("stage", [2, 3])
def test_every_process_can_read_whole_weights(run_distributed: Callable[..., list[Any]], stage: int) -> None:
    assert run_distributed(read_weights, stage=stage) == [[True, True]] * 2
