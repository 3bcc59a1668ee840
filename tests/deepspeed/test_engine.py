"""An `Engine` with DeepSpeed: the same loop, the same guarantees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import assert_close, make_optimizer, train, train_by_hand
from support.tiny import Net

from hftrain import ConfigError, Engine
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.deepspeed


def run_twice(strategy: str) -> dict[str, Any]:
    def make() -> Any:
        return create_strategy(strategy, use_cpu=True)

    return {
        "plain": train(Path("plain"), strategy=make(), shuffle=False),
        "whole": train(Path("whole"), strategy=make(), dropout=0.2),
        "cut": train(Path("cut"), strategy=make(), dropout=0.2, num_steps=4, save_at=4),
        "resumed": train(Path("cut"), strategy=make(), dropout=0.2),
    }


@pytest.mark.parametrize("strategy", ["deepspeed", "deepspeed_stage_2"])
def test_training_equals_one_process_and_resumes(run_distributed: Callable[..., list[Any]], strategy: str) -> None:
    answers = run_distributed(run_twice, strategy=strategy)
    assert_close(answers[0]["plain"]["weights"], train_by_hand(world_size=2))
    for answer in answers:
        whole, resumed = answer["whole"], answer["resumed"]
        assert resumed["start"] == 4
        assert resumed["losses"] == whole["losses"][8:]
        assert all(resumed[name] == whole[name] for name in ("weights", "rate", "mean", "epoch"))


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
