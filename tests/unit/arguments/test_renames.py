from __future__ import annotations

import pytest

from hftrain import TrainingArguments
from hftrain.core.errors import ConfigError

RULES = [
    ({"evaluation_strategy": "epoch"}, "eval_strategy", "epoch"),
    ({"evaluation_strategy": "no"}, "eval_strategy", "no"),
    ({"no_cuda": True}, "use_cpu", True),
    ({"per_gpu_train_batch_size": 4}, "per_device_train_batch_size", 4),
    ({"per_gpu_eval_batch_size": 4}, "per_device_eval_batch_size", 4),
    ({"fp16_backend": "cuda_amp"}, "half_precision_backend", "cuda_amp"),
    ({"xpu_backend": "gloo"}, "ddp_backend", "gloo"),
    ({"torchdynamo": "eager"}, "torch_compile_backend", "eager"),
    ({"torchdynamo": "eager"}, "torch_compile", True),
    ({"push_to_hub_token": "t"}, "hub_token", "t"),
    ({"push_to_hub_model_id": "m"}, "hub_model_id", "m"),
    ({"push_to_hub_model_id": "m", "push_to_hub_organization": "org"}, "hub_model_id", "org/m"),
    ({"push_to_hub_organization": "org"}, "hub_model_id", "org/out"),
    ({"adafactor": True}, "optim", "adafactor"),
    ({"optim": "adamw_hf"}, "optim", "adamw_torch"),
    ({"tpu_metrics_debug": True}, "debug", ["tpu_metrics_debug"]),
    ({"tpu_metrics_debug": True, "debug": "underflow_overflow"}, "debug", ["underflow_overflow", "tpu_metrics_debug"]),
    ({"use_mps_device": True}, "use_cpu", False),
    ({"include_inputs_for_metrics": True}, "include_for_metrics", ["inputs"]),
    ({"include_inputs_for_metrics": True, "include_for_metrics": ["loss"]}, "include_for_metrics", ["loss", "inputs"]),
    ({"sharded_ddp": True}, "fsdp", ["shard_grad_op"]),
    ({"sharded_ddp": "simple"}, "fsdp", ["shard_grad_op"]),
    ({"sharded_ddp": "zero_dp_2 cpu_offload"}, "fsdp", ["shard_grad_op", "offload"]),
    ({"sharded_ddp": ["zero_dp_3", "auto_wrap"]}, "fsdp", ["full_shard", "auto_wrap"]),
    ({"fsdp_min_num_params": 9, "fsdp": "full_shard"}, "fsdp_config", {"min_num_params": 9}),
    (
        {"fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp": "full_shard", "fsdp_config": {"xla": False}},
        "fsdp_config",
        {"xla": False, "transformer_layer_cls_to_wrap": "Block"},
    ),
]


@pytest.mark.parametrize(("given", "new", "value"), RULES)
def test_old_spelling_works_with_a_warning(given, new, value):
    with pytest.warns(FutureWarning, match="deprecated. Use ") as caught:
        args = TrainingArguments("out", **given)
    assert getattr(args, new) == value
    assert {record.filename for record in caught} == {__file__}, "the warning points at the user's line"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"evaluation_strategy": "steps"}, {"eval_strategy": "epoch"}),
        ({"per_gpu_train_batch_size": 4}, {"per_device_train_batch_size": 16}),
        ({"per_gpu_eval_batch_size": 4}, {"per_device_eval_batch_size": 16}),
        ({"fp16_backend": "cuda_amp"}, {"half_precision_backend": "cpu_amp"}),
        ({"xpu_backend": "ccl"}, {"ddp_backend": "gloo"}),
        ({"torchdynamo": "eager"}, {"torch_compile_backend": "inductor"}),
        ({"push_to_hub_token": "secret1"}, {"hub_token": "secret2"}),
        ({"push_to_hub_model_id": "a"}, {"hub_model_id": "b"}),
        ({"adafactor": True}, {"optim": "sgd"}),
        ({"sharded_ddp": "simple"}, {"fsdp": "full_shard"}),
        ({"fsdp_min_num_params": 9}, {"fsdp_config": {"min_num_params": 8}}),
        ({"fsdp_min_num_params": 9}, {"fsdp_config": "fsdp.json"}),
    ],
)
def test_contradiction_names_both(old, new):
    with pytest.raises(ConfigError, match=rf"Cannot use {next(iter(old))} together with {next(iter(new))}") as caught:
        TrainingArguments("out", **old, **new)
    assert "secret" not in str(caught.value)
