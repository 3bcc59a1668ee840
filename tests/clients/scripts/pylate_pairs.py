"""PyLate: ColBERT models with sentence-transformers' trainer."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from scripts.parts import ARGUMENTS, SeedEachStep, bert_config, fit, sentences, tokenizer


def triplets(count: int, *, seed: int) -> Dataset:
    """Return texts, each with one that belongs to it and one that does not."""
    names = ("query", "positive", "negative")
    return Dataset.from_dict({name: sentences(count, seed=seed + n) for n, name in enumerate(names)})


def train(folder: str, **settings: Any) -> dict[str, Any]:
    """Train with the contrastive loss."""
    from pylate import losses, models, utils
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from transformers import BertModel

    torch.manual_seed(0)
    BertModel(bert_config()).save_pretrained("bert")
    tokenizer(max_length=64).save_pretrained("bert")
    model = models.ColBERT("bert", device="cpu", embedding_size=8, query_length=12, document_length=16)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(folder, **{**ARGUMENTS, **settings}),
        train_dataset=triplets(26, seed=1),
        eval_dataset=triplets(10, seed=5),
        loss=losses.Contrastive(model=model),
        data_collator=utils.ColBERTCollator(model.tokenize),
        callbacks=[SeedEachStep()],
    )
    return fit(trainer)
