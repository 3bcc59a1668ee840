"""Tiny transformers models with random weights, and data for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hftrain import set_seed

Rows = list[dict[str, Any]]

NAMES = ("bert", "llama", "t5")
VOCABULARY = ["[PAD]", "[UNK]", *(chr(ord("a") + index) for index in range(26))]
_LENGTH = 8
_SIZE = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}


def make_model(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Build a classifier (``"bert"``), a causal language model (``"llama"``) or an encoder-decoder (``"t5"``)."""
    import transformers

    set_seed(seed)
    if name == "bert":
        shares = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        config = transformers.BertConfig(**_SIZE, **shares, **{"num_labels": 3, **options})
        return transformers.BertForSequenceClassification(config)
    if name == "llama":
        config = transformers.LlamaConfig(**_SIZE, num_key_value_heads=1, attention_dropout=dropout, **options)
        return transformers.LlamaForCausalLM(config)
    sizes = {"vocab_size": len(VOCABULARY), "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=dropout, decoder_start_token_id=0, **options)
    return transformers.T5ForConditionalGeneration(config)


def make_rows(name: str, num: int = 22, *, seed: int = 1) -> Rows:
    """Make samples as plain lists: a run of the alphabet, with its class or with some of its tokens as labels."""
    generator = torch.Generator().manual_seed(seed)
    rows: Rows = []
    for _ in range(num):
        tokens = 2 + (torch.randint(26, (), generator=generator) + torch.arange(_LENGTH)) % 26
        num_kept = int(torch.randint(2, _LENGTH + 1, (), generator=generator))
        row = {"input_ids": tokens.tolist(), "attention_mask": [1] * _LENGTH}
        if name == "bert":
            row["label"] = int(tokens[0]) % 3
        else:
            row["labels"] = [*tokens[:num_kept].tolist(), *[-100] * (_LENGTH - num_kept)]
        rows.append(row)
    return rows


def collate(rows: Rows) -> dict[str, torch.Tensor]:
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    return {"labels" if name == "label" else name: value for name, value in batch.items()}


def make_tokenizer(**tokens: str | None) -> Any:
    """Build a tokenizer in memory whose words are single letters; it pads with "[PAD]" unless told another token."""
    import tokenizers
    import transformers

    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", **tokens}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def run_options(**options: Any) -> dict[str, Any]:
    """Return settings, for either library's arguments, of a silent run that logs every step and saves nothing."""
    defaults = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "use_cpu": True,
    }
    return {**defaults, **options}


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Tell whether two models hold the same weights, to the last bit."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


def losses_of(history: list[Mapping[str, Any]]) -> list[float]:
    return [entry["loss"] for entry in history if "loss" in entry]
