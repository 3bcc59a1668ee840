"""Which optimizer and which schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import make_arguments

from hftrain.optim.optimizers import OptimizerConfig
from hftrain.optim.schedules import ScheduleConfig


def test_optimizer_follows_the_arguments(tmp_path: Path) -> None:
    arguments = make_arguments(
        tmp_path, optim="sgd", learning_rate=0.5, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6,
        optim_args="momentum=0.9",
    )  # fmt: skip
    assert OptimizerConfig.of(arguments) == OptimizerConfig(
        name="sgd",
        learning_rate=0.5,
        weight_decay=0.1,
        betas=(0.8, 0.9),
        eps=1e-6,
        options="momentum=0.9",
        use_cpu=True,
    )


def test_schedule_follows_the_arguments(tmp_path: Path) -> None:
    arguments = make_arguments(
        tmp_path, lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2}, warmup_steps=3
    )
    assert ScheduleConfig.of(arguments, num_training_steps=10) == ScheduleConfig(
        name="cosine_with_restarts", num_training_steps=10, num_warmup_steps=3, options={"num_cycles": 2}
    )


def test_target_modules_are_handed_on(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, optim="galore_adamw", optim_target_modules=["attn", "mlp"])
    assert OptimizerConfig.of(arguments).target_modules == ["attn", "mlp"]


@pytest.mark.parametrize(
    ("options", "optimizers", "schedules"),
    [
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, 3, 0),
        ({"lr_scheduler_type": "linear", "warmup_steps": 3}, 3, 3),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.25, "max_steps": 12}, 3, 0),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.25}, 0, 3),
    ],
)
def test_schedule_free_optimizers_warm_up_themselves(
    tmp_path: Path, options: dict[str, Any], optimizers: int, schedules: int
) -> None:
    arguments = make_arguments(tmp_path, optim="schedule_free_adamw", **options)
    assert OptimizerConfig.of(arguments).warmup_steps == optimizers
    assert ScheduleConfig.of(arguments, num_training_steps=12).num_warmup_steps == schedules
