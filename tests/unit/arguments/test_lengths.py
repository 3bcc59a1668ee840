from __future__ import annotations

from typing import Any

import pytest

from hftrain import TrainingArguments
from hftrain.arguments.training import resolve
from hftrain.core.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_steps": "500ba"}, {"max_steps": 500}),
        ({"max_steps": "1e3ba"}, {"max_steps": 1000}),
        ({"max_steps": "1.5ep"}, {"max_steps": -1, "num_train_epochs": 1.5}),
        ({"num_train_epochs": "10ep"}, {"num_train_epochs": 10.0, "max_steps": -1}),
        ({"num_train_epochs": "10ep", "max_steps": 7}, {"num_train_epochs": 10.0, "max_steps": 7}),
        ({"num_train_epochs": "20ba"}, {"max_steps": 20}),
        ({"warmup_steps": "0.1dur"}, {"warmup_steps": 0.1}),
        ({"warmup_steps": "50ba"}, {"warmup_steps": 50}),
        ({"eval_steps": "0.25dur", "save_steps": "5ba", "logging_steps": "2ba"}, {"eval_steps": 0.25, "save_steps": 5}),
        ({"eval_steps": "0.5ep", "save_steps": "2h"}, {"eval_steps": "0.5ep", "save_steps": "2h"}),
        ({"eval_strategy": "steps", "logging_steps": "30s"}, {"eval_steps": "30s"}),
    ],
)
def test_texts_become_numbers_where_the_run_need_not_be_known(given: dict[str, Any], expected: dict[str, Any]) -> None:
    args = TrainingArguments("out", **given)
    assert {name: getattr(args, name) for name in expected} == expected
    before = args.to_dict()
    resolve(args)
    assert args.to_dict() == before


def test_setters_take_them() -> None:
    args = TrainingArguments("out").set_training(max_steps="30ba").set_save(strategy="steps", steps="2h")
    assert (args.max_steps, args.save_steps) == (30, "2h")


def test_best_model_needs_both_intervals_to_be_the_same() -> None:
    options: dict[str, Any] = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": "0.5ep",
    }
    assert TrainingArguments("out", save_steps="0.5ep", **options).save_steps == "0.5ep"
    for steps in ("1ep", 10):
        with pytest.raises(ConfigError, match="coincide"):
            TrainingArguments("out", save_steps=steps, **options)
