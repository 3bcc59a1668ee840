from __future__ import annotations

import pytest

from hftrain import SchedulerType, TrainingArguments
from hftrain.core.errors import ConfigError

DOCUMENTED_EXAMPLES = [
    ("set_training", (), {"learning_rate": 1e-4, "batch_size": 32}, {"learning_rate": 1e-4, "do_train": True}),
    ("set_evaluate", (), {"strategy": "steps", "steps": 100}, {"eval_steps": 100, "do_eval": True}),
    ("set_testing", (), {"batch_size": 32}, {"per_device_eval_batch_size": 32, "do_predict": True}),
    ("set_save", (), {"strategy": "steps", "steps": 100}, {"save_steps": 100}),
    ("set_logging", (), {"strategy": "steps", "steps": 100}, {"logging_steps": 100}),
    ("set_push_to_hub", ("me/awesome-model",), {}, {"hub_model_id": "me/awesome-model", "push_to_hub": True}),
    ("set_optimizer", (), {"name": "adamw_torch", "beta1": 0.8}, {"optim": "adamw_torch", "adam_beta1": 0.8}),
    ("set_lr_scheduler", (), {"name": "cosine", "warmup_ratio": 0.05}, {"warmup_ratio": 0.05}),
    (
        "set_dataloader",
        (),
        {"train_batch_size": 16, "eval_batch_size": 64},
        {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 64},
    ),
]


@pytest.mark.parametrize(("method", "positional", "named", "expected"), DOCUMENTED_EXAMPLES)
def test_documented_example_holds_and_chains(method, positional, named, expected):
    args = TrainingArguments("working_dir")
    assert getattr(args, method)(*positional, **named) is args
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("method", "named", "expected"),
    [
        (
            "set_training",
            {"num_epochs": 1, "max_steps": 5, "gradient_accumulation_steps": 2, "seed": 1, "weight_decay": 0.1},
            {"num_train_epochs": 1, "max_steps": 5, "gradient_accumulation_steps": 2, "seed": 1, "weight_decay": 0.1},
        ),
        ("set_training", {"gradient_checkpointing": True}, {"gradient_checkpointing": True}),
        (
            "set_evaluate",
            {"batch_size": 2, "accumulation_steps": 3, "delay": 1.5, "loss_only": True, "jit_mode": True},
            {
                "per_device_eval_batch_size": 2,
                "eval_accumulation_steps": 3,
                "eval_delay": 1.5,
                "prediction_loss_only": True,
                "jit_mode_eval": True,
                "do_eval": False,
            },
        ),
        ("set_evaluate", {}, {"eval_delay": 0, "eval_strategy": "no"}),
        ("set_testing", {"loss_only": True, "jit_mode": True}, {"prediction_loss_only": True, "jit_mode_eval": True}),
        ("set_save", {"strategy": "epoch", "total_limit": 2, "on_each_node": True}, {"save_total_limit": 2}),
        (
            "set_logging",
            {"report_to": "wandb", "level": "info", "replica_level": "error"},
            {"report_to": ["wandb"], "log_level": "info", "log_level_replica": "error"},
        ),
        (
            "set_logging",
            {},
            {
                "report_to": [],
                "logging_nan_inf_filter": False,
                "log_on_each_node": False,
                "log_level_replica": "passive",
            },
        ),
        (
            "set_push_to_hub",
            {"model_id": "m", "strategy": "end", "token": "t", "private_repo": True, "revision": "main"},
            {"hub_strategy": "end", "hub_token": "t", "hub_private_repo": True, "hub_revision": "main"},
        ),
        (
            "set_optimizer",
            {"name": "adafactor", "beta2": 0.9, "epsilon": 1e-6, "args": "a=1"},
            {"optim": "adafactor", "adam_beta2": 0.9, "adam_epsilon": 1e-6, "optim_args": "a=1"},
        ),
        (
            "set_lr_scheduler",
            {"name": "cosine", "num_epochs": 2, "max_steps": 9, "warmup_steps": 3},
            {"lr_scheduler_type": SchedulerType.COSINE, "num_train_epochs": 2, "max_steps": 9, "warmup_steps": 3},
        ),
        (
            "set_dataloader",
            {"drop_last": True, "num_workers": 1, "pin_memory": False, "persistent_workers": True, "sampler_seed": 7},
            {"dataloader_drop_last": True, "dataloader_pin_memory": False, "data_seed": 7},
        ),
    ],
)
def test_setter_fills_its_fields(method, named, expected):
    args = getattr(TrainingArguments("out"), method)(**named)
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize("method", ["set_evaluate", "set_save", "set_logging"])
def test_zero_steps_with_strategy_steps_raise(method):
    with pytest.raises(ConfigError, match="steps=0"):
        getattr(TrainingArguments("out"), method)(strategy="steps", steps=0)
