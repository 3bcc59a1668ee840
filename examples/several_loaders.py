"""Train on two data sets at once, and evaluate on each.

python examples/several_loaders.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

from hftrain import Mixture, TaskModule, Trainer, TrainingArguments, set_seed


class Digits(TaskModule):
    """A classifier of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch["pixels"]), batch["labels"])

    evaluation_step = training_step


def main() -> None:
    """Mix scans and noisy scans 80 to 20."""
    set_seed(0)
    scans = load_digits()
    pixels, labels = torch.tensor(scans.images / 16, dtype=torch.float32), torch.tensor(scans.target)
    clean = [{"pixels": each, "labels": label} for each, label in zip(pixels, labels, strict=True)]
    noisy = [{**row, "pixels": row["pixels"] + 0.3 * torch.randn(8, 8)} for row in clean]
    args = TrainingArguments(
        "runs/several_loaders",
        num_train_epochs=5,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
    )
    trainer = Trainer(
        Digits(),
        args,
        train_dataset=Mixture({"clean": (clean[:1400], 0.8), "noisy": (noisy[:1400], 0.2)}, window=32),
        eval_dataset={"clean": clean[1400:], "noisy": noisy[1400:]},
    )
    trainer.train()
    print({name: round(value, 3) for name, value in trainer.evaluate().items() if name.endswith("_loss")})


if __name__ == "__main__":
    main()
