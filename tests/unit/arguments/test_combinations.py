from __future__ import annotations

import logging

import pytest

from hftrain.arguments import TrainingArguments

BEST = {"load_best_model_at_end": True, "eval_strategy": "steps"}
FSDP = {"fsdp": "full_shard"}


@pytest.mark.parametrize(
    "given",
    [
        BEST,
        {**BEST, "eval_steps": 100, "save_steps": 300},
        {**BEST, "eval_steps": 0.1, "save_steps": 0.3},
        {**BEST, "save_strategy": "best", "metric_for_best_model": "acc"},
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"dataloader_prefetch_factor": 2, "dataloader_num_workers": 1},
        {"gradient_accumulation_steps": 2, "accelerator_config": {"gradient_accumulation_kwargs": {}}},
        {"fsdp": "full_shard offload auto_wrap"},
        {"fsdp": "hybrid_shard offload"},
        {**FSDP, "fsdp_config": {"cpu_ram_efficient_loading": True}},
    ],
)
def test_consistent_settings_pass(given):
    TrainingArguments("out", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"deepspeed": {}}, "does not choose DeepSpeed"),
        ({**FSDP, "fsdp_config": {"xla_fsdp_v2": True}}, "no effect without the key xla"),
        ({**FSDP, "gradient_checkpointing": True}, "activation_checkpointing"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, "_kwargs has no effect without gradient_check"),
        ({"liger_kernel_config": {"rope": True}}, "liger_kernel_config has no effect without use_liger_kernel=True"),
        ({"hub_strategy": "end"}, "hub_strategy has no effect without push_to_hub=True"),
        ({"hub_always_push": True}, "hub_always_push has no effect without push_to_hub=True"),
    ],
)
def test_setting_without_effect_warns_once(given, message):
    with pytest.warns(UserWarning, match=message):
        TrainingArguments("out", **given)
    TrainingArguments("out", **given)


def test_both_warmups_are_noted(caplog):
    with caplog.at_level(logging.INFO, logger="hftrain"):
        TrainingArguments("out", warmup_steps=5, warmup_ratio=0.1)
    assert "warmup_steps wins" in caplog.text
