"""Older forms of the documented hooks keep working."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from hftrain import FitLoop
from hftrain.core.signatures import taking
from hftrain.precision.registry import precisions
from hftrain.strategies.fsdp.strategy import FSDPStrategy
from hftrain.strategies.registry import create_strategy


@pytest.mark.parametrize(
    ("function", "by_position", "by_keyword", "without"),
    [
        (lambda a, b, extra=None: (a, b, extra), (1, 2, 3), (1, 2, 3), (1, 2, None)),
        (lambda a, b: (a, b), (1, 2), (1, 2), (1, 2)),
        (lambda a, b, *, extra=None: (a, b, extra), (1, 2, 3), (1, 2, 3), (1, 2, None)),
        (lambda a, b, c="c", extra=None: (a, b, c, extra), (1, 2, "c", 3), (1, 2, "c", 3), (1, 2, "c", None)),
        (lambda a, b, **rest: (a, b, rest), (1, 2, {"extra": 3}), (1, 2, {"extra": 3}), (1, 2, {})),
        (lambda a, *rest: (a, *rest), (1, 2, 3), (1, 2), (1, 2)),
        (lambda *args, **kwargs: (args, kwargs), ((1, 2), {"extra": 3}), ((1, 2), {"extra": 3}), ((1, 2), {})),
    ],
)
def test_hook_of_any_form_takes_the_argument(
    function: Callable[..., Any], by_position: Any, by_keyword: Any, without: Any
) -> None:
    hook = taking(function, 2, "extra")
    assert hook(1, 2, 3) == by_position
    assert hook(1, 2, extra=3) == by_keyword
    assert hook(1, 2) == without


class Folds(FitLoop):
    def __init__(self, num_folds: int = 5, *, names: tuple[str, ...] = ()) -> None:
        self.num_folds, self.names = num_folds, names


class ManyFolds(Folds):
    def __init__(self, **options: Any) -> None:
        super().__init__(num_folds=50, **options)


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (lambda: create_strategy("single"), "SingleDeviceStrategy()"),
        (
            lambda: create_strategy("ddp_find_unused", use_cpu=True),
            "DDPStrategy(use_cpu=True, find_unused_parameters=True)",
        ),
        (
            lambda: FSDPStrategy(sharding="hybrid_shard", shard_size=2),
            "FSDPStrategy(sharding='hybrid_shard', shard_size=2)",
        ),
        (lambda: precisions.create("tf32"), "FullPrecision(matmul='high')"),
        (FitLoop, "FitLoop()"),
        (lambda: Folds(3, names=()), "Folds(num_folds=3)"),
        (lambda: copy.deepcopy(ManyFolds(names=("a",))), "ManyFolds(names=('a',))"),
    ],
)
def test_repr_shows_the_arguments_that_differ_from_the_defaults(made: Callable[[], Any], shown: str) -> None:
    assert repr(made()) == shown
