from __future__ import annotations

from pathlib import Path

import pytest

from hftrain import AcceleratorConfig, TrainingArguments
from hftrain.core.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("output_dir", None, "trainer_output"),
        ("output_dir", Path("a/b"), "a/b"),
        ("report_to", None, None),
        ("report_to", "none", []),
        ("report_to", ["none"], []),
        ("report_to", "all", ["all"]),
        ("report_to", "wandb", ["wandb"]),
        ("report_to", ["wandb", "mlflow"], ["wandb", "mlflow"]),
        ("label_names", "labels", ["labels"]),
        ("label_names", None, None),
        ("include_for_metrics", "loss", ["loss"]),
        ("optim_target_modules", "all-linear", "all-linear"),
        ("optim_target_modules", ["attn"], ["attn"]),
        ("debug", "", []),
        ("debug", "underflow_overflow tpu_metrics_debug", ["underflow_overflow", "tpu_metrics_debug"]),
        ("debug", ["underflow_overflow"], ["underflow_overflow"]),
        ("fsdp", "", []),
        ("fsdp", None, []),
        ("fsdp", False, []),
        ("fsdp", True, ["full_shard"]),
        ("fsdp", "full shard auto_wrap", ["full_shard", "auto_wrap"]),
        ("fsdp", ["shard_grad_op"], ["shard_grad_op"]),
        ("lr_scheduler_kwargs", None, {}),
        ("lr_scheduler_kwargs", '{"num_cycles": 2}', {"num_cycles": 2}),
        ("gradient_checkpointing_kwargs", '{"use_reentrant": false}', {"use_reentrant": False}),
        ("liger_kernel_config", '{"rope": true}', {"rope": True}),
        ("deepspeed", '{"zero_optimization": {"stage": 2}}', {"zero_optimization": {"stage": 2}}),
        ("deepspeed", "ds.json", "ds.json"),
        ("accelerator_config", ' {"split_batches": true}', AcceleratorConfig(split_batches=True)),
        ("accelerator_config", "acc.json", "acc.json"),
        ("eval_delay", None, 0),
        ("include_num_input_tokens_seen", "no", False),
        ("include_num_input_tokens_seen", True, "all"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*has no effect without")
def test_value_takes_its_one_form(name, given, kept):
    assert getattr(TrainingArguments(**{name: given}), name) == kept


def test_key_of_fsdp_config_that_says_two_things_is_refused():
    with pytest.raises(ConfigError, match="They are one key, with the values 5 and 6"):
        TrainingArguments("out", fsdp="full_shard", fsdp_config={"fsdp_min_num_params": 5, "min_num_params": 6})
    same = TrainingArguments("out", fsdp="full_shard", fsdp_config={"fsdp_version": 2, "version": 2})
    assert same.fsdp_config == {"version": 2}


def test_fsdp_config_loses_prefixes_and_text_booleans():
    config = {"fsdp_use_orig_params": "true", "xla": "False", "backward_prefetch": "backward_pre"}
    args = TrainingArguments("out", fsdp="full_shard", fsdp_config=config)
    assert args.fsdp_config == {"use_orig_params": True, "xla": False, "backward_prefetch": "backward_pre"}
    assert "fsdp_use_orig_params" in config, "the caller's dict is left alone"


def test_numbers_and_booleans_written_as_text_are_read_in_every_dict_setting():
    args = TrainingArguments(
        "out",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs='{"use_reentrant": "false"}',
        lr_scheduler_kwargs='{"num_cycles": "2"}',
        accelerator_config='{"split_batches": "false"}',
    )
    assert args.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}
    assert args.accelerator_config.split_batches is False


def test_home_folder_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    args = TrainingArguments("~/out", logging_dir="~/logs")
    assert (args.output_dir, args.logging_dir) == (str(tmp_path / "out"), str(tmp_path / "logs"))
