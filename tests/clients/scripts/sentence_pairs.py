"""sentence-transformers: SentenceTransformerTrainer with a loss that has no weights of its own."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from scripts.parts import ARGUMENTS, SeedEachStep, fit, num_to_evaluate, sentences
from scripts.sentence_transformer import backbone


def pairs(count: int, seed: int) -> Dataset:
    """Return pairs of sentences with a similarity each."""
    left, right = sentences(count, seed=seed), sentences(count, seed=seed + 1)
    return Dataset.from_dict({"sentence1": left, "sentence2": right, "score": [len(text) % 5 / 5 for text in left]})


def train(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on pairs with similarities, with accumulation and evaluations."""
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    model = backbone()
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(folder, **{**ARGUMENTS, **settings}),
        train_dataset=pairs(32, 1),
        eval_dataset=pairs(num_to_evaluate(10), 3),
        loss=CosineSimilarityLoss(model),
        callbacks=[SeedEachStep()],
    )
    return fit(trainer)
