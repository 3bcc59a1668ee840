from __future__ import annotations

import math

import numpy
import pytest

from hftrain.arguments import TrainingArguments
from hftrain.core.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("per_device_train_batch_size", value) for value in (0, -1, 2.5)),
        ("per_device_eval_batch_size", 0),
        ("gradient_accumulation_steps", 0),
        ("max_steps", -2),
        ("torch_empty_cache_steps", 0),
        ("eval_accumulation_steps", 0),
        *(("warmup_steps", value) for value in (-1, -0.1, None)),
        ("past_index", -2),
        ("seed", -1),
        ("data_seed", -1),
        ("local_rank", -2),
        ("ddp_bucket_cap_mb", 0),
        ("tpu_num_cores", 0),
        ("dataloader_num_workers", -1),
        ("dataloader_prefetch_factor", 0),
        *(("learning_rate", value) for value in (-1e-3, math.nan)),
        ("weight_decay", -0.1),
        ("adam_beta1", 1.5),
        ("adam_beta2", -0.1),
        ("adam_epsilon", -1e-8),
        ("max_grad_norm", -1.0),
        ("num_train_epochs", math.nan),
        *(("warmup_ratio", value) for value in (-0.1, 1.1)),
        ("label_smoothing_factor", 1.5),
        ("neftune_noise_alpha", -1),
        ("eval_delay", -1),
        ("ddp_timeout", 0),
        ("logging_steps", -2),
        ("save_steps", -0.5),
        ("eval_steps", -5),
        ("save_steps", "many"),
        *((name, None) for name in ("gradient_accumulation_steps", "max_steps", "past_index", "seed")),
        ("dataloader_num_workers", None),
    ],
)
def test_number_out_of_range_raises(name, value):
    with pytest.raises(ConfigError, match=rf"Cannot use {name}=.*: it must be"):
        TrainingArguments("out", **{name: value})


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
    ("name", "value", "hint"),
    [
        ("log_level", "warn", "'warning'"),
        ("log_level_replica", "inf", "'info'"),
        ("half_precision_backend", "cuda_map", "'cuda_amp'"),
        ("fp16_opt_level", "O4", "O0, O1, O2, O3"),
        ("dataloader_multiprocessing_context", "spwan", "'spawn'"),
        ("include_num_input_tokens_seen", "nonpadding", "'non_padding'"),
        ("include_for_metrics", ["input"], "'inputs'"),
    ],
)
def test_unknown_name_raises_with_close_matches(name, value, hint):
    with pytest.raises(ConfigError, match=f"{name}.*{hint}"):
        TrainingArguments("out", **{name: value})


@pytest.mark.parametrize("name", ["logging_steps", "eval_steps", "save_steps"])
def test_steps_above_one_must_be_whole(name):
    with pytest.raises(ConfigError, match=rf"{name}=2\.5\..*whole numbers"):
        TrainingArguments("out", **{name: 2.5})


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [("logging_strategy", "logging_steps"), ("eval_strategy", "eval_steps"), ("save_strategy", "save_steps")],
)
def test_zero_steps_raise_only_with_strategy_steps(strategy, steps):
    with pytest.raises(ConfigError, match=f"Cannot use {strategy}='steps' with {steps}=0"):
        TrainingArguments("out", **{strategy: "steps", steps: 0})
    assert getattr(TrainingArguments("out", **{strategy: "epoch", steps: 0}), steps) == 0


def test_eval_steps_derived_from_zero_logging_steps_raise():
    with pytest.raises(ConfigError, match="eval_steps=0"):
        TrainingArguments("out", eval_strategy="steps", logging_strategy="no", logging_steps=0)


@pytest.mark.parametrize("epochs", [0, -1.0, None])
def test_run_without_length_raises_unless_steps_are_given(epochs):
    with pytest.raises(ConfigError, match="num_train_epochs"):
        TrainingArguments("out", num_train_epochs=epochs)
    assert TrainingArguments("out", num_train_epochs=epochs, max_steps=5).max_steps == 5
