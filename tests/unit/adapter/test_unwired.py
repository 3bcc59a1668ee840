from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from hftrain.adapter.unwired import UNWIRED, check_local_rank, check_wired
from hftrain.arguments import Seq2SeqTrainingArguments, TrainingArguments
from hftrain.core.errors import ConfigError

WIRED_NAMES = """
output_dir overwrite_output_dir do_train do_eval do_predict resume_from_checkpoint run_name
eval_strategy evaluation_strategy eval_steps eval_delay eval_accumulation_steps eval_do_concat_batches eval_on_start
batch_eval_metrics prediction_loss_only include_inputs_for_metrics include_for_metrics label_names
per_device_train_batch_size per_device_eval_batch_size per_gpu_train_batch_size per_gpu_eval_batch_size
gradient_accumulation_steps num_train_epochs max_steps torch_empty_cache_steps average_tokens_across_devices
learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm optim optim_args adafactor
lr_scheduler_type lr_scheduler_kwargs warmup_ratio warmup_steps label_smoothing_factor
log_level log_level_replica log_on_each_node logging_strategy logging_first_step logging_steps logging_nan_inf_filter
report_to disable_tqdm debug tpu_metrics_debug
save_strategy save_steps save_total_limit save_safetensors save_only_model restore_callback_states_from_checkpoint
load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
no_cuda use_cpu use_mps_device seed data_seed full_determinism tf32
local_rank xpu_backend ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_timeout
accelerator_config bf16 fp16 half_precision_backend fp16_backend gradient_checkpointing gradient_checkpointing_kwargs
dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
dataloader_prefetch_factor remove_unused_columns
push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision push_to_hub_model_id
push_to_hub_organization push_to_hub_token group_by_length length_column_name sortish_sampler
deepspeed fsdp fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap sharded_ddp
"""
WIRED = set(WIRED_NAMES.split())

CHANGED = {
    "logging_dir": "logs",
    "skip_memory_metrics": False,
    "include_tokens_per_second": True,
    "include_num_input_tokens_seen": "all",
    "project": "mine",
    "trackio_space_id": None,
    "eval_use_gather_object": True,
    "past_index": 2,
    "use_legacy_prediction_loop": True,
    "jit_mode_eval": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "auto_find_batch_size": True,
    "optim_target_modules": "all-linear",
    "neftune_noise_alpha": 0.1,
    "save_on_each_node": True,
    "tpu_num_cores": 8,
    "mp_parameters": "{}",
    "parallelism_config": object(),
    "ray_scope": "all",
    "fp16_opt_level": "O2",
    "use_ipex": True,
    "torch_compile": True,
    "torch_compile_backend": "eager",
    "torch_compile_mode": "default",
    "torchdynamo": "eager",
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
    "predict_with_generate": True,
    "generation_max_length": 5,
    "generation_num_beams": 2,
    "generation_config": "folder",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def test_every_documented_setting_is_wired_or_listed():
    names = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert not WIRED & set(UNWIRED)
    assert names == WIRED | set(UNWIRED)
    assert set(CHANGED) == set(UNWIRED)


@pytest.mark.parametrize("cls", [TrainingArguments, Seq2SeqTrainingArguments])
def test_defaults_pass(cls):
    check_wired(cls("out"))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:fsdp_config has no effect")
@pytest.mark.parametrize("name", sorted(UNWIRED))
def test_changed_setting_raises(name):
    args = Seq2SeqTrainingArguments("out", **{name: CHANGED[name]})
    with pytest.raises(ConfigError, match=r"Not wired in this version: .*set it to its default") as caught:
        check_wired(args)
    assert UNWIRED[name] in str(caught.value)
    assert "secret" not in str(caught.value)


def test_all_changed_settings_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        check_wired(TrainingArguments("out", torch_compile=True, report_to="wandb", jit_mode_eval=True))
    for shown in ("torch_compile=True", "report_to=['wandb']", "jit_mode_eval=True"):
        assert shown in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"half_precision_backend": "cuda_amp"},
        {"half_precision_backend": "cpu_amp"},
        {"report_to": "none"},
        {"accelerator_config": {"split_batches": True, "even_batches": False, "use_seedable_sampler": False}},
        {"accelerator_config": {"dispatch_batches": None}},
        {"accelerator_config": {"dispatch_batches": False, "non_blocking": False}},
    ],
)
def test_wired_values_pass(given):
    check_wired(TrainingArguments("out", **given))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"report_to": "all"}, "report_to"),
        ({"half_precision_backend": "apex"}, "half_precision_backend"),
    ],
)
def test_value_that_is_not_wired_raises(given, shown):
    with pytest.raises(ConfigError, match=shown):
        check_wired(TrainingArguments("out", **given))


def test_fields_of_a_subclass_are_its_own():
    @dataclass
    class Own(TrainingArguments):
        extra: int = 3

    check_wired(Own("out", extra=4))


@pytest.mark.parametrize(("given", "launched"), [(0, None), (1, "0")])
def test_local_rank_without_launcher_raises(monkeypatch, given, launched):
    if launched is not None:
        monkeypatch.setenv("LOCAL_RANK", launched)
    with pytest.raises(ConfigError, match="torchrun"):
        check_local_rank(TrainingArguments("out", local_rank=given))


@pytest.mark.parametrize(("given", "launched"), [(-1, None), (-1, "1"), (1, "1")])
def test_local_rank_that_the_launcher_confirms_passes(monkeypatch, given, launched):
    if launched is not None:
        monkeypatch.setenv("LOCAL_RANK", launched)
    check_local_rank(TrainingArguments("out", local_rank=given))
