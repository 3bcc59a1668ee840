"""Keep an exponential moving average of the weights, evaluate with it, and compare it with the last weights.

python examples/averaged_weights.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from hftrain import EMA, StepOutput, TaskModule, Trainer, TrainingArguments, set_seed


class Digits(TaskModule):
    """A classifier of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        logits = self.model(batch["pixels"])
        self.accuracy.update(logits, batch["labels"])
        return StepOutput(loss=nn.functional.cross_entropy(logits, batch["labels"]))

    evaluation_step = training_step


def main() -> None:
    """Train, and evaluate both sets of weights."""
    set_seed(0)
    scans = load_digits()
    pixels, labels = torch.tensor(scans.images / 16, dtype=torch.float32), torch.tensor(scans.target)
    data = [{"pixels": each, "labels": label} for each, label in zip(pixels, labels, strict=True)]
    args = TrainingArguments(
        "runs/averaged_weights",
        num_train_epochs=5,
        per_device_train_batch_size=32,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
    )
    trainer = Trainer(Digits(), args, train_dataset=data[:1400], eval_dataset=data[1400:], callbacks=[EMA(decay=0.98)])
    trainer.train()
    average, last = trainer.evaluate(), trainer.evaluate(ckpt="last", weights="live")
    print(f"accuracy {average['eval_accuracy']:.4f}, of the last weights {last['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main()
