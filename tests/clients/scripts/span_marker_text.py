"""span_marker: its Trainer for named entities."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from scripts.parts import ARGUMENTS, SeedEachStep, bert_config, fit, sentences, tokenizer

NAMES = {"cat", "dog", "bird", "fish"}


def rows(count: int, seed: int) -> Dataset:
    """Return words with their classes."""
    words = [text.split() for text in sentences(count, seed=seed)]
    return Dataset.from_dict({"tokens": words, "ner_tags": [[int(word in NAMES) for word in row] for row in words]})


class Scores:
    """What `evaluate.load("seqeval")` would fetch from the Hub: it gathers labels, and scores them in the end."""

    def __init__(self) -> None:
        self.predictions: list[list[str]] = []
        self.references: list[list[str]] = []

    def add(self, *, prediction: list[str], reference: list[str]) -> None:
        """Add one text."""
        self.predictions.append(prediction)
        self.references.append(reference)

    def compute(self) -> dict[str, float]:
        """Return the scores of all texts."""
        from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score

        kinds = {"precision": precision_score, "recall": recall_score, "f1": f1_score, "accuracy": accuracy_score}
        return {f"overall_{name}": float(score(self.references, self.predictions)) for name, score in kinds.items()}


def train(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on words with classes."""
    from span_marker import SpanMarkerModel, Trainer, evaluation
    from transformers import BertModel, TrainingArguments

    evaluation.evaluate.load = lambda name: Scores()
    torch.manual_seed(0)
    BertModel(bert_config()).save_pretrained("bert")
    tokenizer(max_length=64).save_pretrained("bert")
    model = SpanMarkerModel.from_pretrained(
        "bert", labels=["O", "ANIMAL"], model_max_length=32, marker_max_length=16, entity_max_length=2
    )
    # The whole evaluation in one batch: the means of ragged batches are weighed by labels here, there by samples.
    whole = {"per_device_eval_batch_size": 8}
    trainer = Trainer(
        model=model,
        args=TrainingArguments(folder, **{**ARGUMENTS, **whole, **settings}),
        train_dataset=rows(24, 1),
        eval_dataset=rows(8, 2),
        callbacks=[SeedEachStep()],
    )
    return fit(trainer)
