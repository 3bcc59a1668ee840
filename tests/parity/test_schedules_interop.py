"""Schedules against those of transformers, over whole runs and past their end."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch

from hftrain.optim.schedules import ScheduleConfig, build_schedule, schedules

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.interop

CASES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.3}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 1e-3, "power": 2.5}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 50}),
    ("cosine_with_min_lr", {"min_lr": 1e-3}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 1.5}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-3}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2}),
    ("warmup_stable_decay", {"num_decay_steps": 9}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "min_lr_ratio": 0.1, "num_cycles": 0.7}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "warmup_type": "cosine", "decay_type": "linear"}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "warmup_type": "1-sqrt", "decay_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "num_stable_steps": 5}),
]


def make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.02)


def ours(name: str, warmup: int, options: dict[str, Any]) -> Any:
    config = ScheduleConfig(name=name, num_training_steps=30, num_warmup_steps=warmup, options=options)
    return build_schedule(config, make_optimizer())


def theirs(name: str, warmup: int, options: dict[str, Any]) -> Any:
    return transformers.get_scheduler(name, make_optimizer(), warmup, 30, scheduler_specific_kwargs=dict(options))


def rates(schedule: Any, num_steps: int) -> list[float]:
    used = []
    for _ in range(num_steps):
        used.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return used


def test_schedules_have_the_names_of_transformers() -> None:
    known = {member.value for member in transformers.SchedulerType}
    assert known == set(schedules.names())


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name}-{'-'.join(options)}" for name, options in CASES])
def test_rates_equal_those_of_transformers(name: str, options: dict[str, Any], warmup: int) -> None:
    with warnings.catch_warnings():
        # Both sides say that num_stable_steps wins over the run's length.
        warnings.filterwarnings("ignore", message=".*num_stable_steps")
        expected = rates(theirs(name, warmup, options), 40)
        assert rates(ours(name, warmup, options), 40) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_constant_equals_that_of_transformers() -> None:
    assert rates(ours("constant", 0, {}), 5) == rates(theirs("constant", 0, {}), 5)


def test_plateau_equals_that_of_transformers() -> None:
    options = {"patience": 1, "factor": 0.5}
    pair = [make("reduce_lr_on_plateau", 0, options) for make in (ours, theirs)]
    for metric in (1.0, 0.9, 0.9, 0.9, 0.95, 0.9, 0.2):
        for schedule in pair:
            schedule.step(metric)
        assert pair[0].optimizer.param_groups[0]["lr"] == pair[1].optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", ["linear", "cosine", "constant_with_warmup", "inverse_sqrt", "polynomial"])
@pytest.mark.parametrize(("writer", "reader"), [(ours, theirs), (theirs, ours)], ids=["ours", "theirs"])
def test_a_saved_schedule_resumes_on_the_other_side(name: str, writer: Any, reader: Any) -> None:
    first, second = writer(name, 7, {}), reader(name, 7, {})
    rates(first, 12)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert rates(second, 10) == pytest.approx(rates(first, 10), rel=1e-12, abs=1e-15)
