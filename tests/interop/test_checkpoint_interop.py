"""Checkpoints and the Hugging Face libraries: models that save themselves, and runs that change trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hftrain.checkpoint.weights import load_weights, save_weights
from hftrain.core.errors import CheckpointError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.interop

SIZE = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def build(name: str) -> Any:
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
