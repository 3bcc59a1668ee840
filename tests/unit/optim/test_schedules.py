"""Schedules by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.resuming import through_file
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hftrain.core.errors import ConfigError
from hftrain.optim.schedules import ScheduleConfig, build_schedule, min_rate, stages

REQUIRED: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr": 0.01},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 3},
}
BY_STEP = [
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]


def make_optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))]}, {"params": [torch.nn.Parameter(torch.ones(1))]}]
    return torch.optim.SGD(groups, lr=0.1)


def make_schedule(name: str, warmup: int = 3, **options: Any) -> Any:
    config = ScheduleConfig(
        name=name, num_training_steps=10, num_warmup_steps=warmup, options=REQUIRED.get(name, {}) | options
    )
    return build_schedule(config, make_optimizer())


def rates(schedule: Any, num_steps: int) -> list[float]:
    """Step and collect the rate each update would use."""
    used = []
    for _ in range(num_steps):
        first, second = (group["lr"] for group in schedule.optimizer.param_groups)
        assert first == second
        used.append(first)
        schedule.optimizer.step()
        schedule.step()
    return used


@pytest.mark.parametrize("name", [*BY_STEP, "constant"])
def test_schedule_state_survives_a_file_read_without_trust(name: str) -> None:
    warmup = 0 if name == "constant" else 3
    whole = rates(make_schedule(name, warmup), 10)
    first = make_schedule(name, warmup)
    assert rates(first, 5) == whole[:5]
    second = make_schedule(name, warmup)
    second.load_state_dict(through_file(first.state_dict()))
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert rates(second, 5) == whole[5:]


def test_plateau_lowers_the_rate_and_its_state_survives() -> None:
    schedule = make_schedule("reduce_lr_on_plateau", warmup=0, patience=1, factor=0.5, mode="max")
    assert isinstance(schedule, ReduceLROnPlateau)
    for metric in (1.0, 1.0):
        schedule.step(metric)
    restored = make_schedule("reduce_lr_on_plateau", warmup=0, patience=1, factor=0.5, mode="max")
    restored.load_state_dict(through_file(schedule.state_dict()))
    restored.step(1.0)
    assert [group["lr"] for group in restored.optimizer.param_groups] == [0.05, 0.05]


@pytest.mark.parametrize("name", ["constant", "reduce_lr_on_plateau"])
def test_build_schedule_warns_about_a_warmup_it_ignores(name: str) -> None:
    with pytest.warns(UserWarning, match=f"'{name}' has no warm-up"):
        schedule = make_schedule(name, warmup=3)
    assert schedule.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("name", ["linear", "constant_with_warmup"])
def test_build_schedule_warns_about_a_warmup_longer_than_the_run(name: str) -> None:
    with pytest.warns(UserWarning, match=r"warm-up takes 11 steps, and the run has 10: .* never reaches its full"):
        make_schedule(name, warmup=11)
    make_schedule(name, warmup=10)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("warmup_stable_decay", {}, "It needs num_decay_steps"),
        ("cosine_with_min_lr", {}, "exactly one of min_lr"),
        ("cosine_warmup_with_min_lr", {"min_lr": 0.1, "min_lr_rate": 0.1}, "exactly one of min_lr"),
        ("polynomial", {"lr_end": 0.1}, "below the learning rate"),
        ("polynomial", {"power": "two"}, "cannot be computed"),
        ("inverse_sqrt", {"timescale": 0}, "cannot be computed"),
        ("reduce_lr_on_plateau", {"factor": 2.0}, "cannot be computed"),
    ],
)
def test_build_schedule_refuses_missing_and_impossible_options(
    name: str, options: dict[str, Any], message: str
) -> None:
    config = ScheduleConfig(name=name, num_training_steps=10, options=options)
    with pytest.raises(ConfigError, match=message):
        build_schedule(config, make_optimizer())


@pytest.mark.parametrize("options", [{"min_lr": 0.6}, {"min_lr_rate": 1.5}, {"min_lr_rate": -0.1}])
def test_min_rate_refuses_what_is_no_share(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        min_rate(base_lr=0.5, **options)


def test_stages_follow_a_given_length_and_warn_when_it_does_not_fit() -> None:
    assert stages(warmup=2, total=10, num_decay_steps=3, num_stable_steps=5)["stable"] == 5
    with pytest.warns(UserWarning, match=r"2 \+ 4 \+ 3 steps and the run 10"):
        assert stages(warmup=2, total=10, num_decay_steps=3, num_stable_steps=4)["stable"] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_decay_steps": 9}, "stable stage would have -1"),
        ({"num_decay_steps": -1}, "the decay -1"),
        ({"num_decay_steps": 3, "warmup_type": "lineer"}, "Did you mean 'linear'"),
        ({"num_decay_steps": 3, "decay_type": "step"}, "no such shape"),
        ({"num_decay_steps": 3, "min_lr_ratio": 2.0}, "between 0 and 1"),
    ],
)
def test_stages_refuse_what_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stages(warmup=2, total=10, **options)
