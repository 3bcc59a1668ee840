from __future__ import annotations

from typing import Any

import pytest
from support.stateful import Lines
from torch.utils.data import DataLoader

from hftrain.core.errors import ConfigError
from hftrain.data.loaders import make_limits
from hftrain.extras.limits import LimitedFeed


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 0},
        {"limit_train_batches": True},
        {"limit_eval_batches": 1.5},
        {"limit_eval_batches": "0.5"},
        {"overfit_batches": -1},
        {"sanity_eval_batches": 0.5},
        {"limit_train_batches": 1, "overfit_batches": 1},
    ],
)
def test_impossible_limits_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_limits(**options)


@pytest.mark.parametrize(("value", "expected"), [(3, 3), (1, 1), (1000, 100), (1.0, 100), (0.29, 29), (0.019, 1)])
def test_whole_numbers_are_batches_and_fractions_shares(value: float, expected: int) -> None:
    assert make_limits(limit_train_batches=value).num_train(100) == expected
    assert make_limits(overfit_batches=value).num_train(100) == expected
    assert len(make_limits(limit_eval_batches=value).for_evaluation([[0]] * 100)) == expected


def test_share_of_less_than_a_batch_or_of_unknown_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than one"):
        make_limits(limit_train_batches=0.001).num_train(100)
    with pytest.raises(ConfigError, match="no length"):
        make_limits(limit_eval_batches=0.5).for_evaluation(iter([]))
    assert make_limits(limit_train_batches=5).num_train(None) == 5


def test_data_with_a_position_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="position"):
        LimitedFeed(DataLoader(Lines(range(10))), seed=0, limits=make_limits(limit_train_batches=3))
