"""Older forms of the documented hooks keep working."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import FitLoop, Trainer
from hftrain.core.signatures import accepts, taking
from hftrain.precision.registry import precisions
from hftrain.strategies.fsdp.strategy import FSDPStrategy
from hftrain.strategies.registry import create_strategy


def current(a, b, extra=None):
    return a, b, extra


def older(a, b):
    return a, b


def keyword_only(a, b, *, extra=None):
    return a, b, extra


def elsewhere(a, b, other="other", extra=None):
    return a, b, other, extra


def keywords(a, b, **rest):
    return a, b, rest


def positions(a, *rest):
    return a, *rest


def anything(*args, **kwargs):
    return args, kwargs


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (current, True), (older, False), (keyword_only, True), (elsewhere, True), (keywords, True), (positions, False),
        (anything, True), (functools.partial(current, 1), True), (functools.partial(older, 1), False),
    ],
)  # fmt: skip
def test_argument_is_found_in_a_signature(function: Callable[..., Any], takes: bool) -> None:
    assert accepts(function, "extra") is takes


@pytest.mark.parametrize(
    ("function", "by_position", "by_keyword", "without"),
    [
        (current, (1, 2, 3), (1, 2, 3), (1, 2, None)),
        (older, (1, 2), (1, 2), (1, 2)),
        (keyword_only, (1, 2, 3), (1, 2, 3), (1, 2, None)),
        (elsewhere, (1, 2, "other", 3), (1, 2, "other", 3), (1, 2, "other", None)),
        (keywords, (1, 2, {"extra": 3}), (1, 2, {"extra": 3}), (1, 2, {})),
        (positions, (1, 2, 3), (1, 2), (1, 2)),
        (anything, ((1, 2), {"extra": 3}), ((1, 2), {"extra": 3}), ((1, 2), {})),
    ],
)
def test_hook_of_any_form_takes_the_argument(
    function: Callable[..., Any], by_position: Any, by_keyword: Any, without: Any
) -> None:
    hook = taking(function, 2, "extra")
    assert hook(1, 2, 3) == by_position
    assert hook(1, 2, extra=3) == by_keyword
    assert hook(1, 2) == without


def test_current_form_is_called_directly() -> None:
    assert taking(current, 2, "extra") is current


def test_other_keywords_are_passed_on() -> None:
    assert taking(elsewhere, 2, "extra")(1, 2, 3, other="o") == (1, 2, "o", 3)
    assert taking(lambda a, b=0: (a, b), 1, "extra")(1, 2, b=4) == (1, 4)


def make_override(hook: str, form: str) -> type[Trainer]:
    """Return a Trainer whose hook has one of the forms found in the field, and passes on what it was given."""
    calls: list[Any] = []

    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((len(args), sorted(kwargs)))
        return getattr(super(made, self), hook)(*args, **kwargs)

    forms: dict[str, Any] = {
        "*args, **kwargs": lambda self, *args, **kwargs: override(self, *args, **kwargs),
        "a, b, **kwargs": lambda self, a, b, **kwargs: override(self, a, b, **kwargs),
        "a, b, *args": lambda self, a, b, *args: override(self, a, b, *args),
    }
    made = type("Own", (Trainer,), {hook: forms[form], "calls": calls})
    return made


@pytest.mark.parametrize("form", ["*args, **kwargs", "a, b, **kwargs", "a, b, *args"])
@pytest.mark.parametrize("hook", ["training_step", "get_batch_samples"])
def test_override_that_passes_everything_on_changes_nothing(tmp_path: Path, hook: str, form: str) -> None:
    losses = []
    for kind in (Trainer, make_override(hook, form)):
        torch.manual_seed(0)
        trainer = kind(
            Net(), make_arguments(tmp_path, max_steps=2, gradient_accumulation_steps=2), train_dataset=make_rows(11)
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert trainer.calls  # type: ignore[attr-defined]
    assert losses[0] == losses[1]


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
