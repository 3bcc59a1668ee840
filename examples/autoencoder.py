"""Compress handwritten digits to a few numbers and draw them from these, after Lightning's example of the same name.

python examples/autoencoder.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import mse_loss

from hftrain import TaskModule, Trainer, TrainingArguments, set_seed


class Autoencoder(TaskModule):
    """An encoder to eight numbers, and a decoder from them."""

    def __init__(self) -> None:
        encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
        super().__init__(nn.Sequential(encoder, decoder))

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return mse_loss(self.model(batch["pixels"]), batch["pixels"])

    evaluation_step = training_step


def main() -> None:
    """Train, and print the error on scans that were not trained on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--output-dir", default="runs/autoencoder")
    options = parser.parse_args()
    set_seed(0)
    scans = torch.tensor(load_digits().images / 16, dtype=torch.float32).flatten(1)
    data = [{"pixels": scan} for scan in scans]
    args = TrainingArguments(
        options.output_dir,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=64,
        learning_rate=3e-3,
        logging_steps=100,
        eval_strategy="epoch",
        report_to="none",
    )
    trainer = Trainer(Autoencoder(), args, train_dataset=data[:1500], eval_dataset=data[1500:])
    trainer.train()
    print(f"Variance of the scans: {scans.var(0).mean():.4f}, of the error: {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
