"""Checkpoints and the Hugging Face libraries: models that save themselves, and runs that change trainers."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from hftrain.checkpoint import state_files
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.weights import load_weights, save_weights
from hftrain.core.errors import CheckpointError
from hftrain.core.seed import capture_rng, restore_rng

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.interop

SIZE = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def build(name: str) -> Any:
    """Make a tiny model with random weights."""
    kind, config = {
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig(**SIZE)),
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZE, num_key_value_heads=1)),
        "gpt2": (
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0),
        ),
        "t5": (
            transformers.T5ForConditionalGeneration,
            transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2),
        ),
        # its experts are stored one by one, and held in one tensor
        "mixtral": (
            transformers.MixtralForCausalLM,
            transformers.MixtralConfig(**SIZE, num_key_value_heads=1, num_local_experts=2),
        ),
    }[name]
    return kind(config)


NAMES = ["bert", "llama", "gpt2", "t5", "mixtral"]


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("safe", [True, False])
def test_models_that_save_themselves_round_trip(tmp_path, name, safe):
    model, fresh = build(name), build(name)
    save_weights(model, tmp_path, safe=safe)
    weights = [path.name for path in tmp_path.iterdir() if path.suffix in (".bin", ".safetensors")]
    assert weights == ["model.safetensors" if safe else "pytorch_model.bin"]
    before = torch.get_rng_state()
    load_weights(fresh, tmp_path)
    assert equal(model, fresh)
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(model, type(model).from_pretrained(tmp_path, dtype=torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_sharded_models_of_save_pretrained_are_read(tmp_path, name):
    model, fresh = build(name), build(name)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    load_weights(fresh, tmp_path)
    assert equal(model, fresh)


def test_regrouped_weights_keep_the_precision_of_the_file(tmp_path):
    model, fresh = build("mixtral"), build("mixtral")
    fresh.config.dtype = torch.bfloat16
    save_weights(model, tmp_path)
    load_weights(fresh, tmp_path)
    assert equal(model, fresh)


@pytest.mark.parametrize(("name", "other"), [("bert", "llama"), ("mixtral", "llama"), ("llama", "mixtral")])
def test_another_architecture_is_refused(tmp_path, name, other):
    save_weights(build(name), tmp_path)
    model = build(other)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"{type(model).__name__}.*missing"):
        load_weights(model, tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_another_size_is_refused(tmp_path):
    save_weights(build("mixtral"), tmp_path)
    wider = transformers.MixtralConfig(**{**SIZE, "intermediate_size": 32}, num_key_value_heads=1, num_local_experts=2)
    with pytest.raises(CheckpointError, match="do not fit"):
        load_weights(transformers.MixtralForCausalLM(wider), tmp_path)


def test_missing_regrouped_weights_stay_as_they_are_when_not_strict(tmp_path):
    model, fresh = build("mixtral"), build("mixtral")
    del model.lm_head
    state = {name: value for name, value in model.state_dict().items() if "layernorm" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    norm = fresh.model.layers[0].input_layernorm.weight
    torch.nn.init.constant_(norm, 5.0)
    head = fresh.lm_head.weight.clone()
    load_weights(fresh, tmp_path, strict=False)
    assert (norm == 5.0).all()
    assert torch.equal(fresh.lm_head.weight, head)
    assert torch.equal(fresh.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the Hugging Face Trainer, at step 2."""
    folder = tmp_path_factory.mktemp("foreign")
    data = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}] * 8
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=2, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the other trainer's
        transformers.Trainer(build("llama"), arguments, train_dataset=data).train()
    return folder / "checkpoint-2"


class Solo:
    rank = 0
    world_size = 1
    is_main = True

    def barrier(self) -> None:
        pass

    def all_true(self, flag: bool) -> bool:
        return flag


def test_a_checkpoint_of_the_hugging_face_trainer_is_read(foreign, caplog):
    manager = CheckpointManager(foreign.parent, group=Solo())
    assert manager.latest() is None
    assert manager.open(foreign) is None
    assert "without proof" in caplog.text
    model = build("llama")
    load_weights(model, foreign)
    names = [name for name, _ in model.named_parameters()]
    groups = [[name for name in names if "norm" not in name], [name for name in names if "norm" in name]]
    optimizer = torch.optim.AdamW([{"params": [model.get_parameter(name) for name in group]} for group in groups])
    optimizer.load_state_dict(state_files.load_optimizer(foreign))
    assert state_files.load_part(foreign, "scheduler.pt")["last_epoch"] == 2
    assert state_files.load_trainer_state(foreign).global_step == 2
    restore_rng(state_files.load_rng(foreign, rank=0, world_size=1))
    with pytest.raises(CheckpointError, match=r"training_args\.bin"):
        state_files.load_part(foreign, "training_args.bin")  # a pickle


def test_the_hugging_face_trainer_reads_our_generators(tmp_path):
    state_files.save_rng(capture_rng(), tmp_path, rank=0, world_size=1)
    expected = random.random(), numpy.random.random(), torch.rand(())
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    transformers.Trainer(torch.nn.Linear(1, 1), arguments)._load_rng_state(str(tmp_path))
    assert (random.random(), numpy.random.random(), torch.rand(())) == expected
