"""The arguments and the config: filled, compared, refused; nothing is launched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows

from hftrain import ConfigError, Trainer
from hftrain.core.errors import StrategyError
from hftrain.strategies.deepspeed.strategy import DeepSpeedStrategy
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.deepspeed

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "amp": {"enabled": "auto", "opt_level": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 2},
}


WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
MODEL = Net()


@pytest.fixture(autouse=True)
def variable_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DeepSpeed be imported, which sets this variable and leaves it."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def make(folder: Path, config: Any = None, *, strategy: Any = None, model: Any = None, **options: Any) -> Trainer:
    parts = {name: options.pop(name) for name in ("optimizers", "optimizer_cls_and_kwargs") if name in options}
    arguments = make_arguments(folder, deepspeed=config, **options)
    return Trainer(model or Net(), arguments, train_dataset=make_rows(8), strategy=strategy, **parts)


def config_of(trainer: Trainer) -> dict[str, Any]:
    strategy = trainer.strategy
    assert isinstance(strategy, DeepSpeedStrategy)
    return strategy.config


def test_every_auto_value_comes_from_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    for config in (AUTO, str(tmp_path / "ds.json")):
        trainer = make(
            tmp_path, config, gradient_accumulation_steps=3, max_grad_norm=0.5, learning_rate=0.02, adam_beta1=0.8,
            adam_beta2=0.9, adam_epsilon=1e-7, weight_decay=0.1, bf16=True,
        )  # fmt: skip
        filled = config_of(trainer)
        assert (filled["train_batch_size"], filled["train_micro_batch_size_per_gpu"]) == (12, 4)
        assert (filled["gradient_accumulation_steps"], filled["gradient_clipping"]) == (3, 0.5)
        assert (filled["fp16"]["enabled"], filled["bf16"]["enabled"], filled["amp"]["enabled"]) == (False, True, False)
        assert filled["optimizer"]["params"] == {
            "lr": 0.02, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.1, "torch_adam": True,
        }  # fmt: skip
        trainer.strategy.plan(num_steps=10, num_warmup_steps=2)
        assert filled["scheduler"]["params"] == {"warmup_min_lr": 0, "warmup_max_lr": 0.02, "warmup_num_steps": 2}
    assert AUTO["train_batch_size"] == "auto"


def test_values_that_a_config_leaves_out_come_from_the_arguments_too(tmp_path: Path) -> None:
    filled = config_of(make(tmp_path, strategy="deepspeed", max_grad_norm=2.0, bf16=True))
    assert filled["zero_optimization"]["stage"] == 2
    assert (filled["train_micro_batch_size_per_gpu"], filled["gradient_clipping"]) == (4, 2.0)
    assert filled["bf16"] == {"enabled": True}


def test_all_contradictions_are_in_one_error_before_anything_is_launched(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 3.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 7.0}},
        "zero_optimization": {"stage": 1},
    }
    with pytest.raises(ConfigError, match="it contradicts the arguments") as caught:
        make(tmp_path, config)
    for key in ("train_micro_batch_size_per_gpu=1", "gradient_clipping=3.0", "bf16.enabled=True", "params.lr=7.0"):
        assert key in str(caught.value)
    assert not torch.distributed.is_initialized()


def test_schedule_of_another_length_is_refused(tmp_path: Path) -> None:
    config = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 99}}}
    with pytest.raises(ConfigError, match="total_num_steps=99"):
        make(tmp_path, config).strategy.plan(num_steps=10, num_warmup_steps=0)


def test_warm_up_over_no_step_is_one_that_deepspeed_takes(tmp_path: Path) -> None:
    trainer = make(tmp_path, {"scheduler": {"type": "WarmupLR", "params": WARMUP}, "zero_optimization": {"stage": 0}})
    trainer.strategy.plan(num_steps=10, num_warmup_steps=0)
    from deepspeed.runtime.lr_schedules import WarmupLR

    params = config_of(trainer)["scheduler"]["params"]
    assert params == {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 1}
    WarmupLR(torch.optim.SGD(MODEL.parameters(), lr=1.0), **params)


def test_arguments_that_changed_are_propagated(tmp_path: Path) -> None:
    trainer = make(tmp_path, {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}})
    trainer.args.per_device_train_batch_size = 2
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu=4"):
        trainer.propagate_args_to_deepspeed()
    # Searched for: what the config says of it no longer counts.
    trainer = make(tmp_path, AUTO)
    trainer.args.per_device_train_batch_size = 2
    trainer.propagate_args_to_deepspeed(auto_find_batch_size=True)
    assert config_of(trainer)["train_batch_size"] == 2
    with pytest.raises(ConfigError, match="has no DeepSpeed config"):
        make(tmp_path, strategy="single").propagate_args_to_deepspeed()


def test_trainer_says_that_deepspeed_is_at_work(tmp_path: Path) -> None:
    trainer = make(tmp_path, strategy="deepspeed_stage_1")
    assert trainer.is_deepspeed_enabled
    assert not trainer.place_model_on_device
    assert not make(tmp_path, strategy="single").is_deepspeed_enabled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "deepspeed_stage_3", "auto_find_batch_size": True}, "auto_find_batch_size=True"),
        (
            {
                "strategy": "deepspeed", "save_only_model": True, "load_best_model_at_end": True,
                "save_strategy": "steps", "eval_strategy": "no", "metric_for_best_model": None,
            },
            "Cannot use save_only_model=True with load_best_model_at_end=True",
        ),
        (
            {
                "strategy": "deepspeed",
                "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
            },
            "sync_each_batch",
        ),
        ({"strategy": "deepspeed", "accelerator_config": {"use_configured_state": True}}, "use_configured_state"),
        ({"strategy": "deepspeed_stage_3", "config": {"zero_optimization": {"stage": 2}}}, "means stage 3"),
        ({"strategy": "ddp", "config": {"zero_optimization": {"stage": 2}}}, "Cannot use strategy='ddp' together"),
        ({"strategy": "deepspeed", "fsdp": "full_shard"}, "together with fsdp"),
        ({"strategy": "deepspeed", "fp16": True}, "no float16 on most CPUs"),
        (
            {"config": AUTO, "model": MODEL, "optimizers": (torch.optim.SGD(MODEL.parameters()), None)},
            r"optimizers\[0\]",
        ),
        ({"config": AUTO, "optimizer_cls_and_kwargs": (torch.optim.SGD, {})}, "optimizer_cls_and_kwargs"),
        ({"config": {"zero_optimization": {"stage": 2, "overlap_com": True}}}, "rejects .*overlap_com: Extra inputs"),
        (
            {"config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}}},
            "offload_optimizer.device: Input should be 'none', 'cpu' or 'nvme'",
        ),
        ({"config": {"optimizer": {"type": "Foo"}}}, "there is no optimizer 'Foo'"),
        ({"config": {"scheduler": {"type": "Foo"}}}, "there is no schedule 'Foo'"),
        ({"config": {"scheduler": {"type": "WarmupLR", "params": {**WARMUP, "warmup_type": "auto"}}}}, "warmup_type"),
    ],
)  # fmt: skip
def test_what_deepspeed_cannot_do_is_refused_at_once(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    if options.get("load_best_model_at_end"):
        options = {**options, "eval_strategy": "steps", "eval_steps": 500}
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, **options).train()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("part", ["offload_optimizer", "offload_param"])
@pytest.mark.parametrize(("path", "reason"), [({}, "It has no path"), ({"nvme_path": "drive"}, "does not find it")])
def test_offload_to_nvme_that_cannot_be_is_refused_before_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, path: dict[str, str], reason: str
) -> None:
    # Where libaio is installed, DeepSpeed is made to say that it is not.
    monkeypatch.setattr("deepspeed.ops.op_builder.AsyncIOBuilder.is_compatible", lambda *given, **named: False)
    config = {"zero_optimization": {"stage": 3, part: {"device": "nvme", **path}}}
    with pytest.raises(ConfigError, match=rf"device='nvme' in {part}\..*{reason}"):
        make(tmp_path, config, save_strategy="no").train()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optim": "sgd"}, "optim='sgd' changes nothing: the DeepSpeed config makes the optimizer, AdamW"),
        (
            {"lr_scheduler_type": "cosine"},
            "'cosine' changes nothing: the DeepSpeed config makes the scheduler",
        ),
    ],
)
def test_argument_that_the_config_takes_over_is_named(tmp_path: Path, options: dict[str, str], message: str) -> None:
    make(tmp_path, AUTO, optim="adamw_torch")
    with pytest.warns(UserWarning, match=message):
        make(tmp_path, AUTO, **options)


class OwnOptimizer(Task):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_task_that_makes_an_optimizer_beside_the_configs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"OwnOptimizer\.configure_optimizers"):
        make(tmp_path, AUTO, model=OwnOptimizer()).train()


def test_strategy_given_as_an_object_is_filled_and_takes_no_second_config(tmp_path: Path) -> None:
    strategy = DeepSpeedStrategy(use_cpu=True, config={"zero_optimization": {"stage": 1}})
    assert config_of(make(tmp_path, strategy=strategy))["train_micro_batch_size_per_gpu"] == 4
    with pytest.raises(ConfigError, match="together with deepspeed"):
        make(tmp_path, AUTO, strategy=strategy)


def test_model_without_a_hidden_size_or_parameters_is_refused_before_launch(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    with pytest.raises(ConfigError, match="Net has no config with a hidden_size"):
        make(tmp_path, config).train()
    with pytest.raises(ConfigError, match="none of its parameters requires a gradient"):
        make(tmp_path, {"zero_optimization": {"stage": 1}}, model=Net().requires_grad_(False)).train()
    assert not torch.distributed.is_initialized()


def test_device_that_deepspeed_did_not_choose_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in for a machine with a GPU, on which use_cpu=True was asked for.
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "device_name", lambda self, index=None: "cuda")
    with pytest.raises(StrategyError, match="DS_ACCELERATOR=cpu"):
        create_strategy("deepspeed", use_cpu=True).launch()
    assert not torch.distributed.is_initialized()


def test_launchers_settings_become_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", "ACCELERATE_GRADIENT_CLIPPING": "none",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true", "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_CONFIG_DS_FIELDS": "",
    }  # fmt: skip
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    filled = config_of(make(tmp_path, gradient_accumulation_steps=2))
    assert filled["zero_optimization"] == {
        "stage": 3, "offload_optimizer": {"device": "cpu"}, "stage3_gather_16bit_weights_on_model_save": True,
    }  # fmt: skip
    assert (filled["gradient_accumulation_steps"], filled["gradient_clipping"]) == (2, 1.0)
    assert filled["bf16"] == {"enabled": True}
    # The arguments' own config wins over the launcher's.
    assert config_of(make(tmp_path, {"zero_optimization": {"stage": 1}}))["zero_optimization"] == {"stage": 1}
    with pytest.raises(ConfigError, match=r"The launcher asked for deepspeed"):
        make(tmp_path, strategy="single")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "5")
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=5"):
        make(tmp_path, gradient_accumulation_steps=2)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="together with the launcher's FSDP"):
        make(tmp_path)
