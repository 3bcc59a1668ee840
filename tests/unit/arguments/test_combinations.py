from __future__ import annotations

import logging

import pytest

from hftrain import TrainingArguments

FSDP = {"fsdp": "full_shard"}


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
