"""PEFT: LoRA adapters train, are saved alone, resumed and loaded as the best."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hub_models import collate, make_model, make_rows, run_options, same_weights

from hftrain import ConfigError, Trainer, TrainingArguments
from hftrain.checkpoint.weights import load_weights
from hftrain.core.errors import CheckpointError
from hftrain.strategies.fsdp.strategy import FSDPStrategy

pytestmark = [
    pytest.mark.interop,
    # peft reads names that transformers 5 is renaming.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
peft = pytest.importorskip("peft")


def make_adapted(name: str = "bert", *, seed: int = 0, mixed: bool = False, **options: Any) -> Any:
    kinds = {"bert": "SEQ_CLS", "llama": "CAUSAL_LM"}
    config = peft.LoraConfig(
        r=2, task_type=None if mixed else kinds[name], target_modules=["query", "q_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(make_model(name, seed=seed), config, mixed=mixed, **options)


def make_trainer(folder: Path, model: Any, name: str = "bert", *, strategy: Any = None, **options: Any) -> Trainer:
    arguments = TrainingArguments(str(folder), **run_options(**options))
    rows = make_rows(name, 24)
    parts = {"train_dataset": rows, "eval_dataset": rows[:8], "data_collator": collate, "strategy": strategy}
    return Trainer(model, arguments, **parts)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_adapters_train_and_are_saved_alone(tmp_path: Path, name: str) -> None:
    model = make_adapted(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = make_trainer(tmp_path, model, name, save_strategy="epoch")
    assert trainer.label_names == ["labels"]  # of the base model's signature
    trainer.train()
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed
    assert all("lora_" in key or "modules_to_save" in key for key in changed)
    folder = tmp_path / "checkpoint-12"
    assert (folder / "adapter_model.safetensors").is_file()
    assert (folder / "adapter_config.json").is_file()
    assert not (folder / "model.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(make_model(name), folder)
    assert same_weights(loaded, model)


def make_other(kind: str) -> Any:
    """Return a model with a prompt, with an adapter loaded into it, or one of whose own layers trains beside it."""
    model, lora = make_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"])
    if kind == "loaded":
        try:
            model.add_adapter(lora, adapter_name="mine")
        except ValueError as error:
            if "please use a version >=" not in str(error):
                raise
            pytest.skip(str(error))  # transformers 5.24 wants a peft that had not been released
        return model
    if kind == "beside":
        wrapped = peft.get_peft_model(model, lora)
        model.model.norm.requires_grad_(True)
        return wrapped
    prompts = {
        "prompt": peft.PromptTuningConfig,
        "prefix": peft.PrefixTuningConfig,
        "encoder": peft.PromptEncoderConfig,
    }
    return peft.get_peft_model(model, prompts[kind](task_type="CAUSAL_LM", num_virtual_tokens=3))


@pytest.mark.filterwarnings("ignore:The files of the adapters do not hold:UserWarning")
@pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated:FutureWarning"
)  # peft's prefixes in transformers 5.24
@pytest.mark.parametrize("kind", ["prompt", "prefix", "encoder", "loaded", "beside"])
def test_what_the_adapter_files_do_not_hold_is_resumed_and_comes_back_as_the_best(tmp_path: Path, kind: str) -> None:
    def run(**options: Any) -> Trainer:
        options = {"learning_rate": 0.5, "num_train_epochs": 3, "max_steps": 3, "save_steps": 1, **options}
        return make_trainer(tmp_path, make_other(kind), "llama", save_strategy="steps", **options)

    whole = run()
    whole.train()
    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert same_weights(resumed.model, whole.model)
    best = run(save_only_model=True, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True)
    best.train()
    losses = [entry["eval_loss"] for entry in best.state.log_history if "eval_loss" in entry]
    assert best.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)


@pytest.mark.parametrize("kind", ["beside", "adapters alone"])
@pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_sharded_layer_beside_adapters_is_resumed_or_refused(
    tmp_path: Path, kind: str, form: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch replaces the hook and keeps its own
    request.addfinalizer(torch.distributed.destroy_process_group)

    def run(**options: Any) -> Trainer:
        model = make_other("beside")
        if kind != "beside":
            model.base_model.model.model.norm.requires_grad_(False)
        options = {"learning_rate": 0.1, "num_train_epochs": 3, "max_steps": 3, "save_steps": 1, **options}
        strategy = FSDPStrategy(state_dict_type=form)
        return make_trainer(tmp_path, model, "llama", strategy=strategy, save_strategy="steps", **options)

    whole = run()
    if (kind, form) == ("beside", "FULL_STATE_DICT"):
        with pytest.raises(ConfigError, match=r"Cannot save .*norm\.weight, which train next to adapters"):
            whole.train()
        return
    whole.train()
    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert same_weights(resumed.model, whole.model)


@pytest.mark.parametrize("safe", [True, False])
def test_several_adapters_and_both_formats_come_back(tmp_path: Path, safe: bool) -> None:
    model = make_adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["value"], init_lora_weights=False))
    trainer = make_trainer(tmp_path, model, save_safetensors=safe)
    trainer.save_model()
    twin = make_adapted()
    twin.add_adapter("second", peft.LoraConfig(r=2, target_modules=["value"], init_lora_weights=False))
    for key, parameter in twin.named_parameters():
        if "lora_" in key or "modules_to_save" in key:
            parameter.data.zero_()
    assert not same_weights(twin, model)
    load_weights(twin, tmp_path)
    assert same_weights(twin, model)


def make_named() -> Any:
    """Return a model of two adapters, neither called "default", of which the second is the active one."""
    model = make_adapted(adapter_name="first")
    model.add_adapter(
        "mine", peft.LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["value"], init_lora_weights=False)
    )
    model.set_adapter("mine")
    return model


def test_active_adapter_of_another_name_resumes_and_comes_back_as_the_best(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True, "learning_rate": 0.1
    }  # fmt: skip
    whole = make_trainer(tmp_path, make_named(), **options)
    whole.train()
    for name in ("first", "mine"):
        assert (tmp_path / "checkpoint-6" / name / "adapter_model.safetensors").is_file()
    other = make_named()
    for key, parameter in other.named_parameters():
        if "lora_" in key or "modules_to_save" in key:
            parameter.data.zero_()
    resumed = make_trainer(tmp_path, other, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert resumed.model.active_adapter == "mine"
    assert same_weights(resumed.model, whole.model)
    losses = [entry["eval_loss"] for entry in whole.state.log_history if "eval_loss" in entry]
    assert resumed.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)


@pytest.mark.parametrize("options", [{"r": 3, "target_modules": ["query"]}, {"r": 2, "target_modules": ["value"]}])
def test_adapter_of_another_shape_or_layer_is_refused(tmp_path: Path, options: Any) -> None:
    make_trainer(tmp_path, make_adapted()).save_model()
    config = peft.LoraConfig(task_type="SEQ_CLS", **options)
    with pytest.raises(CheckpointError, match="does not fit"):
        load_weights(peft.get_peft_model(make_model("bert"), config), tmp_path)


def test_mixed_adapters_train_and_resume(tmp_path: Path) -> None:
    model = make_adapted(mixed=True)
    assert type(model).__name__ == "PeftMixedModel"
    whole = make_trainer(tmp_path, model, save_strategy="epoch")
    assert whole.label_names == ["labels"]
    whole.train()
    resumed = make_trainer(tmp_path, make_adapted(mixed=True), save_strategy="epoch")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert same_weights(resumed.model, whole.model)


@pytest.mark.parametrize("options", [None, {"use_reentrant": True}, {"layer_classes": ["LlamaDecoderLayer"]}])
def test_adapters_above_frozen_layers_train_the_same_recomputed(tmp_path: Path, options: Any) -> None:
    plain, again = make_adapted("llama"), make_adapted("llama")
    make_trainer(tmp_path, plain, "llama").train()
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}
    make_trainer(tmp_path, again, "llama", **settings).train()
    assert same_weights(again, plain)
    assert not same_weights(again, make_adapted("llama"))
