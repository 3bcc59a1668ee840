from __future__ import annotations

import pytest

from hftrain import TrainingArguments

STEPS = {"eval_strategy": "steps"}


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({}, "run_name", "out"),
        ({"run_name": "mine"}, "run_name", "mine"),
        ({}, "do_eval", False),
        ({"eval_strategy": "epoch"}, "do_eval", True),
        ({**STEPS, "logging_steps": 7}, "eval_steps", 7),
        ({**STEPS, "eval_steps": 3}, "eval_steps", 3),
        ({"eval_strategy": "epoch"}, "eval_steps", None),
        ({"logging_steps": 20.0}, "logging_steps", 20),
        ({"logging_steps": 1.0}, "logging_steps", 1),
        ({"save_steps": 0.5}, "save_steps", 0.5),
        ({"save_steps": -1}, "save_strategy", "no"),
        ({"save_steps": -1, "save_strategy": "epoch"}, "save_strategy", "epoch"),
        ({}, "metric_for_best_model", None),
        ({}, "greater_is_better", None),
        ({**STEPS, "load_best_model_at_end": True}, "metric_for_best_model", "loss"),
        ({**STEPS, "lr_scheduler_type": "reduce_lr_on_plateau"}, "metric_for_best_model", "loss"),
        ({**STEPS, "load_best_model_at_end": True}, "greater_is_better", False),
        ({"metric_for_best_model": "eval_loss"}, "greater_is_better", False),
        ({"metric_for_best_model": "eval_data1_loss"}, "greater_is_better", False),
        ({"metric_for_best_model": "accuracy"}, "greater_is_better", True),
        ({"metric_for_best_model": "accuracy", "greater_is_better": False}, "greater_is_better", False),
        ({}, "dataloader_pin_memory", True),
        ({"use_cpu": True}, "dataloader_pin_memory", False),
        ({}, "torch_compile_backend", None),
        ({"torch_compile": True}, "torch_compile_backend", "inductor"),
        ({"torch_compile_backend": "eager"}, "torch_compile", True),
        ({"torch_compile_mode": "reduce-overhead"}, "torch_compile", True),
        ({"torch_compile_mode": "reduce-overhead"}, "torch_compile_backend", "inductor"),
    ],
)
def test_open_setting_follows_from_others(given, name, value):
    got = getattr(TrainingArguments("out", **given), name)
    assert got == value
    assert type(got) is type(value) or isinstance(got, str)
