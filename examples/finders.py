"""Find a batch size and a learning rate before training.

python examples/finders.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

from hftrain import TaskModule, Trainer, TrainingArguments, set_seed


class Digits(TaskModule):
    """A classifier of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch["pixels"]), batch["labels"])


def main() -> None:
    """Look for both, set them, and train."""
    set_seed(0)
    scans = load_digits()
    pixels, labels = torch.tensor(scans.images / 16, dtype=torch.float32), torch.tensor(scans.target)
    data = [{"pixels": each, "labels": label} for each, label in zip(pixels, labels, strict=True)]
    args = TrainingArguments("runs/finders", num_train_epochs=3, per_device_train_batch_size=16, save_strategy="no")
    trainer = Trainer(Digits(), args, train_dataset=data)
    args.per_device_train_batch_size = trainer.tune.batch_size(most=64)
    args.learning_rate = trainer.tune.lr().suggestion or args.learning_rate
    print(f"batch size {args.per_device_train_batch_size}, learning rate {args.learning_rate:.2g}")
    print(f"loss {trainer.train().training_loss:.3f}")


if __name__ == "__main__":
    main()
