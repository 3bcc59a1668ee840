"""The documented Trainer, unchanged but for the import: a plain nn.Module, TrainingArguments, compute_metrics.

    python examples/documented_surface.py

Data: 569 breast tumours, 30 measurements each, that ship with scikit-learn.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

from hftrain import Trainer, TrainingArguments


class TumourClassifier(nn.Module):
    """Any module works that returns its loss first when labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))

    def forward(self, measurements: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return (loss, logits) with labels, (logits,) without."""
        logits = self.layers(measurements)
        if labels is None:
            return (logits,)
        return nn.functional.cross_entropy(logits, labels), logits


def make_dataset() -> dict[str, list[dict[str, object]]]:
    """Return a train and a test set of {"measurements": 30 floats, "label": 0 or 1, "id": a column nobody needs}."""
    tumours = load_breast_cancer()
    scaled = (tumours.data - tumours.data.mean(axis=0)) / tumours.data.std(axis=0)
    rows: list[dict[str, object]] = [
        {"measurements": row.astype("float32"), "label": int(label), "id": f"tumour {index}"}
        for index, (row, label) in enumerate(zip(scaled, tumours.target, strict=True))
    ]
    order = np.random.default_rng(0).permutation(len(rows))
    return {"train": [rows[i] for i in order[:400]], "test": [rows[i] for i in order[400:]]}


def compute_metrics(eval_pred: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Return the share of tumours that are classified right."""
    predictions, labels = eval_pred
    return {"accuracy": float((predictions.argmax(axis=-1) == labels).mean())}


def main() -> None:
    """Train, pick the best epoch, predict."""
    dataset = make_dataset()
    training_args = TrainingArguments(
        output_dir="runs/documented_surface",
        learning_rate=2e-3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        num_train_epochs=5,
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        logging_steps=25,
    )
    trainer = Trainer(
        model=TumourClassifier(),
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        compute_metrics=compute_metrics,
    )
    trainer.train()
    output = trainer.predict(dataset["test"])
    trainer.log_metrics("test", output.metrics)
    trainer.save_metrics("test", output.metrics)
    print(f"Wrong: {int((output.predictions.argmax(-1) != output.label_ids).sum())} of {len(output.label_ids)}.")
    print(f"Best checkpoint: {Path(str(trainer.state.best_model_checkpoint)).name}")


if __name__ == "__main__":
    main()
