from __future__ import annotations

import logging

import pytest

from hftrain.arguments import TrainingArguments
from hftrain.core.errors import ConfigError

BEST = {"load_best_model_at_end": True, "eval_strategy": "steps"}
FSDP = {"fsdp": "full_shard"}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"load_best_model_at_end": True}, "Without evaluation"),
        ({"load_best_model_at_end": True, "save_strategy": "no"}, "Without evaluation"),
        ({**BEST, "save_strategy": "epoch"}, "must be evaluated"),
        ({**BEST, "eval_steps": 200, "save_steps": 300}, "between two evaluations"),
        ({**BEST, "eval_steps": 300, "save_steps": 100}, "between two evaluations"),
        ({**BEST, "eval_steps": 0.1, "save_steps": 0.25}, "between two evaluations"),
        ({**BEST, "eval_steps": 0.5, "save_steps": 10}, "share of the run"),
        ({**BEST, "eval_steps": 10, "save_steps": 0.5}, "share of the run"),
        ({"save_strategy": "best", "eval_strategy": "epoch"}, "which metric"),
        ({"save_strategy": "best", "metric_for_best_model": "acc"}, "nothing would be saved"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "follows an evaluation metric"),
        ({"fp16": True, "bf16": True}, "one half precision"),
        ({"fp16_full_eval": True, "bf16_full_eval": True}, "one half precision"),
        ({"fp16": True, "half_precision_backend": "apex"}, "torch's own mixed precision is its successor"),
        ({"use_ipex": True}, "bf16=True and torch_compile=True are its successors"),
        ({"dataloader_prefetch_factor": 2}, "there are none"),
        ({"dataloader_persistent_workers": True}, "there are none"),
        ({**FSDP, "deepspeed": "ds.json"}, "shared between processes"),
        ({"fsdp": "offload"}, "can be offloaded"),
        ({"fsdp": "no_shard offload"}, "can be offloaded"),
        ({"fsdp": "full_shard shard_grad_op"}, "sharded in one way"),
        ({"fsdp": "full_shard no_shard"}, "Keep one of full_shard, no_shard"),
        ({"fsdp": "full_shard hybrid_shard"}, "Keep one of full_shard, hybrid_shard"),
    ],
)
def test_contradiction_raises(given, reason):
    with pytest.raises(ConfigError, match=f"Cannot use .*{reason}"):
        TrainingArguments("out", **given)


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
