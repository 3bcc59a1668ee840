"""sentence-transformers: CrossEncoderTrainer on pairs with scores."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from scripts.parts import ARGUMENTS, SeedEachStep, bert_config, fit, sentences, tokenizer


def pairs(count: int, seed: int) -> Dataset:
    """Return pairs of sentences with a score each."""
    left, right = sentences(count, seed=seed), sentences(count, seed=seed + 1)
    return Dataset.from_dict({"query": left, "passage": right, "label": [len(text) % 5 / 5 for text in left]})


def train(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on pairs with scores; load the best checkpoint at the end."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
    from transformers import BertForSequenceClassification

    BertForSequenceClassification(bert_config(num_labels=1)).save_pretrained("bert")
    tokenizer().save_pretrained("bert")
    args = CrossEncoderTrainingArguments(
        folder,
        **{**ARGUMENTS, **settings},
        load_best_model_at_end=True,
        lr_scheduler_type="cosine",
    )
    trainer = CrossEncoderTrainer(
        model=CrossEncoder("bert", num_labels=1, device="cpu", max_length=24),
        args=args,
        train_dataset=pairs(26, 1),
        eval_dataset=pairs(10, 3),
        callbacks=[SeedEachStep()],
    )
    return fit(trainer)
