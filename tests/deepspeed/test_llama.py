"""ZeRO-3 with a transformers model on two real processes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt
from support.tiny import make_arguments, make_trainer

from hftrain import ConfigError, HfDeepSpeedConfig, Trainer, TrainingArguments, set_seed

pytestmark = pytest.mark.deepspeed
pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def variable_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed, which transformers imports, sets it in this process."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def make_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip


def make_rows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 32, (16, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def train(folder: str, *, stop: int | None = None, resume: bool = False, **zero: Any) -> list[float]:
    from transformers import LlamaForCausalLM

    set_seed(5)
    config = {"stage": 3, **dict.fromkeys(BUCKETS, "auto"), **zero}
    trainer = make_trainer(
        Path(folder), LlamaForCausalLM(make_config()), train_dataset=make_rows(), eval_dataset=make_rows()[:5],
        callbacks=[StopAt(stop)], per_device_train_batch_size=2, gradient_accumulation_steps=2, eval_strategy="steps",
        eval_steps=1, save_strategy="steps", save_steps=2, max_steps=4, deepspeed={"zero_optimization": config},
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]


def train_and_resume(folder: str) -> dict[str, list[list[float]]]:
    """Save right after evaluations, which leave parameters on their way to the next layers; stop, and go on."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed's use of torch
    answers = {}
    for is_gathered in (False, True):
        zero = {"stage3_gather_16bit_weights_on_model_save": is_gathered}
        whole = train(f"{folder}/whole {is_gathered}", **zero)
        train(f"{folder}/parts {is_gathered}", stop=2, **zero)
        answers[str(is_gathered)] = [whole, train(f"{folder}/parts {is_gathered}", resume=True, **zero)]
    return answers


def build_after_the_arguments(folder: str, source: str, has_group: bool) -> dict[str, Any]:
    """Build and load models once the arguments are there, and train one; and build one when they are gone."""
    from transformers import LlamaForCausalLM

    if has_group:
        torch.distributed.init_process_group("gloo")
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed's use of torch
    zero = {"stage": 3, **dict.fromkeys(BUCKETS, "auto"), "stage3_gather_16bit_weights_on_model_save": True}
    config = {"zero_optimization": zero, "train_batch_size": "auto", "bf16": {"enabled": "auto"}}
    args = make_arguments(Path(folder), per_device_train_batch_size=2, max_steps=3, deepspeed=config)
    splits = HfDeepSpeedConfig(args)
    loaded = LlamaForCausalLM.from_pretrained(source)
    from_config = LlamaForCausalLM._from_config(make_config())
    sizes = [[parameter.numel() for parameter in model.parameters()] for model in (loaded, from_config)]
    trainer = Trainer(loaded, args, train_dataset=make_rows())
    trainer.train()
    trainer.save_model(f"{folder}/final")
    found = {"sizes": sizes, "whole": loaded.lm_head.weight.ds_numel}
    del splits
    found["after"] = LlamaForCausalLM._from_config(make_config()).lm_head.weight.numel()
    if has_group:
        assert torch.distributed.get_world_size() == 2
        torch.distributed.destroy_process_group()
    return {**found, "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


@pytest.mark.parametrize("has_group", [False, True], ids=["own group", "user's group"])
def test_model_built_after_the_arguments_is_split_from_the_start(
    tmp_path: Path, run_distributed: Any, has_group: bool
) -> None:
    from transformers import LlamaForCausalLM

    set_seed(5)
    LlamaForCausalLM(make_config()).save_pretrained(tmp_path / "source")
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 3, "optim": "adamw_torch"}
    alone = make_trainer(
        tmp_path / "alone", LlamaForCausalLM.from_pretrained(tmp_path / "source"), train_dataset=make_rows(), **options
    )
    alone.train()
    folders = {"folder": str(tmp_path / "two"), "source": str(tmp_path / "source")}
    answers = run_distributed(build_after_the_arguments, **folders, has_group=has_group)
    for answer in answers:
        assert all(size == 0 for sizes in answer["sizes"] for size in sizes)
        assert answer["whole"] == answer["after"] == 32 * 16
        expected = [entry["loss"] for entry in alone.state.log_history if "loss" in entry]
        assert answer["losses"] == pytest.approx(expected, rel=1e-4)
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "two" / "final").state_dict()
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4)


def test_arguments_without_a_config_are_refused() -> None:
    with pytest.raises(ConfigError, match="they hold no DeepSpeed config"):
        HfDeepSpeedConfig(TrainingArguments("out"))


def test_run_with_automatic_buckets_saves_after_evaluating_and_resumes(tmp_path: Path, run_distributed: Any) -> None:
    for answer in run_distributed(train_and_resume, folder=str(tmp_path)):
        for whole, resumed in answer.values():
            assert len(whole) == 8
            assert resumed == pytest.approx(whole, rel=1e-6)
