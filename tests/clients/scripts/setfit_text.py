"""setfit: its Trainer over sentence-transformers', which replaces the call of the callbacks on the instance."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from scripts.parts import SeedEachStep, sentences
from scripts.sentence_transformer import backbone


def texts(count: int, seed: int) -> Dataset:
    """Return texts of two classes."""
    made = sentences(count, seed=seed)
    return Dataset.from_dict({"text": made, "label": [number % 2 for number in range(count)]})


def train(folder: str, gradient_accumulation_steps: int) -> dict[str, Any]:
    """Train the sentence encoder on pairs of texts, then the classifier on its vectors."""
    from setfit import SetFitModel, Trainer, TrainingArguments

    model = SetFitModel(model_body=backbone(), model_head=head())
    args = TrainingArguments(
        folder,
        batch_size=4,
        max_steps=6,
        num_iterations=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        body_learning_rate=1e-2,
        report_to="none",
        seed=11,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=texts(8, 1),
        eval_dataset=texts(6, 3),
        metric=accuracy,
        callbacks=[SeedEachStep()],
    )
    trainer.train()
    trainer.st_trainer.trained_module = model.model_body
    return {"accuracy": trainer.evaluate()["accuracy"], "coefficients": model.model_head.coef_.ravel().tolist()}


def accuracy(predicted: Any, labels: Any) -> dict[str, float]:
    """Return the share of right answers."""
    return {"accuracy": sum(int(p) == int(y) for p, y in zip(predicted, labels, strict=True)) / len(labels)}


def head() -> Any:
    """Return the classifier of the vectors."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression()
