"""FlagEmbedding: its runners for embedders and rerankers over a tiny BERT."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from scripts.parts import ARGUMENTS, SeedEachStep, bert_config, sentences, tokenizer

# Nothing evaluates: the runners take no data for it.
SETTINGS = {name: value for name, value in ARGUMENTS.items() if not name.startswith("eval_")}


def train(kind: str, prefix: str, folder: str, **settings: Any) -> dict[str, Any]:
    """Train with the runner of a kind, on texts with one that belongs to them and one that does not.

    More of them would be drawn from Python's generator, where hftrain gives the data numbers of its own.
    """
    import transformers

    task, more = ("reranker", {"max_len": 32}) if "reranker" in kind else ("embedder", {})
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification if task == "reranker" else transformers.BertModel
    model(bert_config(num_labels=1)).save_pretrained("bert")
    tokenizer(bos_token="[CLS]", eos_token="[SEP]").save_pretrained("bert")
    rows = [
        {"query": q, "pos": [p], "neg": [n]}
        for q, p, n in zip(*(sentences(24, seed=s) for s in (1, 2, 3)), strict=True)
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    module = importlib.import_module(f"FlagEmbedding.finetune.{kind}")
    shared = importlib.import_module(f"FlagEmbedding.abc.finetune.{task}")
    kinds = [
        getattr(module, f"{prefix}{what}Arguments", None) or getattr(shared, f"Abs{task.title()}{what}Arguments")
        for what in ("Model", "Data", "Training")
    ]
    runner = getattr(module, f"{prefix}Runner")(
        kinds[0](model_name_or_path="bert"),
        kinds[1](train_data=["rows.jsonl"], train_group_size=2, query_max_len=16, passage_max_len=16, **more),
        kinds[2](folder, **SETTINGS, **settings),
    )
    runner.trainer.add_callback(SeedEachStep())
    runner.run()
    return {}


def embedder(folder: str, **settings: Any) -> dict[str, Any]:
    """Train an embedder."""
    return train("embedder.encoder_only.base", "EncoderOnlyEmbedder", folder, **settings)


def reranker(folder: str, **settings: Any) -> dict[str, Any]:
    """Train a reranker."""
    return train("reranker.encoder_only.base", "EncoderOnlyReranker", folder, **settings)


def m3(folder: str, **settings: Any) -> dict[str, Any]:
    """Train dense, sparse and multi-vector embeddings together."""
    return train("embedder.encoder_only.m3", "EncoderOnlyEmbedderM3", folder, unified_finetuning=True, **settings)
