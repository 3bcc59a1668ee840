"""Options that depend on the run."""

from __future__ import annotations

from typing import Any

import pytest

from hftrain.core.errors import ConfigError
from hftrain.optim import schedule_options


def test_end_rate_is_a_share_of_the_learning_rate() -> None:
    assert schedule_options.end_rate(base_lr=0.5, lr_end=0.1) == {"end_rate": 0.2}


@pytest.mark.parametrize("base_lr", [0.1, 0.05])
def test_end_rate_refuses_a_rate_that_is_not_below(base_lr: float) -> None:
    with pytest.raises(ConfigError, match="below the learning rate"):
        schedule_options.end_rate(base_lr=base_lr, lr_end=0.1)


def test_min_rate_takes_a_rate_or_a_share() -> None:
    assert schedule_options.min_rate(base_lr=0.5, min_lr=0.1) == {"min_rate": 0.2}
    assert schedule_options.min_rate(base_lr=0.5, min_lr_rate=0.1) == {"min_rate": 0.1}


@pytest.mark.parametrize("options", [{}, {"min_lr": 0.1, "min_lr_rate": 0.1}])
def test_min_rate_refuses_both_and_none(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="exactly one of min_lr"):
        schedule_options.min_rate(base_lr=0.5, **options)


@pytest.mark.parametrize("options", [{"min_lr": 0.6}, {"min_lr_rate": 1.5}, {"min_lr_rate": -0.1}])
def test_min_rate_refuses_what_is_no_share(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        schedule_options.min_rate(base_lr=0.5, **options)


def test_stages_fill_the_run() -> None:
    laid_out = schedule_options.stages(warmup=2, total=10, num_decay_steps=3)
    assert laid_out == {
        "stable": 5,
        "decay": 3,
        "warmup_type": "linear",
        "decay_type": "cosine",
        "min_rate": 0.0,
    }


def test_stages_follow_a_given_length_and_warn_when_it_does_not_fit() -> None:
    assert schedule_options.stages(warmup=2, total=10, num_decay_steps=3, num_stable_steps=5)["stable"] == 5
    with pytest.warns(UserWarning, match=r"2 \+ 4 \+ 3 steps and the run 10"):
        assert schedule_options.stages(warmup=2, total=10, num_decay_steps=3, num_stable_steps=4)["stable"] == 4


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
        schedule_options.stages(warmup=2, total=10, **options)
