"""FSDP with a transformers model: its own hint for the units, tied embeddings, its own way to save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import make_arguments

from hftrain import Trainer, set_seed

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.interop,
    # peft reads names that transformers 5 is renaming.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


def make_llama(*, with_adapters: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    set_seed(5)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=16,
    )  # fmt: skip
    if not with_adapters:
        return LlamaForCausalLM(config)
    import peft

    adapters = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(LlamaForCausalLM(config), adapters)


def train(folder: str, *, size: int, with_adapters: bool = False, **options: Any) -> list[float]:
    """Train a tiny Llama with tied embeddings, save it, and return its losses."""
    model = make_llama(with_adapters=with_adapters)
    rows = [{"input_ids": torch.randint(0, 32, (6,)), "labels": torch.randint(0, 32, (6,))} for _ in range(16)]
    args = make_arguments(
        Path(folder), per_device_train_batch_size=size, gradient_accumulation_steps=2, save_strategy="epoch",
        eval_strategy="epoch", load_best_model_at_end=True, **options,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:3])
    trainer.train()
    trainer.save_model(f"{folder}/final")
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]


def test_transformers_model_trains_saves_and_comes_back(tmp_path: Path, run_distributed: Any) -> None:
    from transformers import LlamaForCausalLM

    both = run_distributed(train, folder=str(tmp_path / "two"), size=2, fsdp="full_shard auto_wrap")
    alone = train(str(tmp_path / "one"), size=4)
    assert both[0] == both[1] == pytest.approx(alone, rel=1e-4)
    ours, theirs = (LlamaForCausalLM.from_pretrained(tmp_path / name / "final") for name in ("two", "one"))
    assert ours.config.architectures == ["LlamaForCausalLM"]
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


def train_and_recompute(folder: str) -> list[list[float]]:
    """Train with each engine while activations are recomputed, all of the model and adapters alone."""
    config = {"activation_checkpointing": True, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    return [
        train(
            f"{folder}/{version}{with_adapters}", size=2, with_adapters=with_adapters, fsdp="full_shard auto_wrap",
            fsdp_config={**config, "version": version},
        )
        for version in (1, 2) for with_adapters in (False, True)
    ]  # fmt: skip


def test_transformers_model_recomputes_activations(tmp_path: Path, run_distributed: Any) -> None:
    pytest.importorskip("peft")
    alone = [train(str(tmp_path / f"one{adapters}"), size=4, with_adapters=adapters) for adapters in (False, True)]
    both = run_distributed(train_and_recompute, folder=str(tmp_path / "two"))
    for losses in both:
        for found, expected in zip(losses, [*alone, *alone], strict=True):
            assert found == pytest.approx(expected, rel=1e-4)
