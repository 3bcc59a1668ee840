from __future__ import annotations

import math

import numpy
import pytest

from hftrain import TrainingArguments
from hftrain.core.errors import ConfigError

BEST = {"load_best_model_at_end": True, "eval_strategy": "steps"}
FSDP = {"fsdp": "full_shard"}


@pytest.mark.parametrize(
    "given",
    [
        *({"per_device_train_batch_size": value} for value in (0, -1, 2.5)),
        {"per_device_eval_batch_size": 0},
        {"gradient_accumulation_steps": 0},
        {"max_steps": -2},
        {"torch_empty_cache_steps": 0},
        {"eval_accumulation_steps": 0},
        *({"warmup_steps": value} for value in (-1, -0.1, None)),
        {"past_index": -2},
        {"seed": -1},
        {"data_seed": -1},
        {"local_rank": -2},
        {"ddp_bucket_cap_mb": 0},
        {"tpu_num_cores": 0},
        {"dataloader_num_workers": -1},
        {"dataloader_prefetch_factor": 0},
        *({"learning_rate": value} for value in (-0.001, math.nan)),
        {"weight_decay": -0.1},
        {"adam_beta1": 1.5},
        {"adam_beta2": -0.1},
        {"adam_epsilon": -1e-08},
        {"max_grad_norm": -1.0},
        {"num_train_epochs": math.nan},
        *({"warmup_ratio": value} for value in (-0.1, 1.1)),
        {"label_smoothing_factor": 1.5},
        {"neftune_noise_alpha": -1},
        {"eval_delay": -1},
        {"ddp_timeout": 0},
        {"logging_steps": -2},
        {"save_steps": -0.5},
        {"eval_steps": -5},
        {"save_steps": "many"},
        *({name: None} for name in ("gradient_accumulation_steps", "max_steps", "past_index", "seed")),
        {"dataloader_num_workers": None},
        {"log_level": "warn"},
        {"log_level_replica": "inf"},
        {"half_precision_backend": "cuda_map"},
        {"fp16_opt_level": "O4"},
        {"dataloader_multiprocessing_context": "spwan"},
        {"include_num_input_tokens_seen": "nonpadding"},
        {"include_for_metrics": ["input"]},
        {"eval_strategy": "epochs"},
        {"logging_strategy": "step"},
        {"save_strategy": "besst"},
        {"hub_strategy": "evry_save"},
        {"lr_scheduler_type": "linar"},
        {"optim": "adam_torch"},
        {"debug": "underflow"},
        {"fsdp": "full_shrad"},
        {"lr_scheduler_kwargs": "num_cycles=2"},
        {"gradient_checkpointing_kwargs": "[1]"},
        {"deepspeed": "{broken"},
        *({name: 2.5} for name in ("logging_steps", "eval_steps", "save_steps")),
        {"logging_steps": 0, "logging_strategy": "no", "eval_strategy": "steps"},
        {"max_steps": "2h"},
        {"max_steps": "1e9tok"},
        {"num_train_epochs": "0.5dur"},
        {"max_steps": "1.5ba"},
        {"warmup_steps": "1ep"},
        {"eval_steps": "1dur"},
        {"save_steps": "2.5ba"},
        {"logging_steps": "10tok"},
        {"eval_steps": "10 epochs"},
        {"learning_rate": "2h"},
        {"load_best_model_at_end": True},
        {"load_best_model_at_end": True, "save_strategy": "no"},
        {**BEST, "save_strategy": "epoch"},
        {**BEST, "eval_steps": 200, "save_steps": 300},
        {**BEST, "eval_steps": 300, "save_steps": 100},
        {**BEST, "eval_steps": 0.1, "save_steps": 0.25},
        {**BEST, "eval_steps": 0.5, "save_steps": 10},
        {**BEST, "eval_steps": 10, "save_steps": 0.5},
        {"save_strategy": "best", "eval_strategy": "epoch"},
        {"save_strategy": "best", "metric_for_best_model": "acc"},
        {"lr_scheduler_type": "reduce_lr_on_plateau"},
        {"fp16": True, "bf16": True},
        {"fp16_full_eval": True, "bf16_full_eval": True},
        {"fp16": True, "half_precision_backend": "apex"},
        {"use_ipex": True},
        {"dataloader_prefetch_factor": 2},
        {"dataloader_persistent_workers": True},
        {**FSDP, "deepspeed": "ds.json"},
        {"fsdp": "offload"},
        {"fsdp": "no_shard offload"},
        {"fsdp": "full_shard shard_grad_op"},
        {"fsdp": "full_shard no_shard"},
        {"fsdp": "full_shard hybrid_shard"},
    ],
    ids=str,
)
def test_mistake_is_refused_with_the_settings_name(given):
    with pytest.raises(ConfigError) as raised:
        TrainingArguments("out", **given)
    assert any(name in str(raised.value) for name in given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", numpy.float32(1e-3)),
        ("per_device_train_batch_size", numpy.int64(4)),
        ("max_grad_norm", None),
        ("warmup_ratio", 1),
        ("learning_rate", 0),
    ],
)
def test_number_at_the_edge_passes(name, value):
    assert getattr(TrainingArguments("out", **{name: value}), name) == value


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [("logging_strategy", "logging_steps"), ("eval_strategy", "eval_steps"), ("save_strategy", "save_steps")],
)
def test_zero_steps_raise_only_with_strategy_steps(strategy, steps):
    with pytest.raises(ConfigError, match=f"Cannot use {strategy}='steps' with {steps}=0"):
        TrainingArguments("out", **{strategy: "steps", steps: 0})
    assert getattr(TrainingArguments("out", **{strategy: "epoch", steps: 0}), steps) == 0
