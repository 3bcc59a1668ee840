"""Train on handwritten digits with a flight log; three of the scans are spoiled, and make the loss spike.

python examples/flight_log.py --output-dir runs/flight/a
hftrain blame runs/flight/a --output exclude.json
python examples/flight_log.py --output-dir runs/flight/a --resume runs/flight/a/checkpoint-20 --exclude exclude.json
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from hftrain import FlightLog, Trainer, TrainingArguments, set_seed

SPOILED = (281, 1344, 268)  # of the steps 30, 40 and 51


class Digits(nn.Module):
    """A small classifier."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(64, 10)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = pixels.flatten(1)
        for block in self.blocks:
            hidden = self.dropout(torch.relu(block(hidden)))
        logits = self.head(hidden)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def sample_losses(outputs: Any, batch: Any) -> torch.Tensor:
    """Return the loss of each sample, for the flight log."""
    return cross_entropy(outputs["logits"], batch["labels"], reduction="none")


def make(args: TrainingArguments, dropout: float = 0.1, **options: Any) -> Trainer:
    """Return the Trainer, for ``hftrain capsule`` without data."""
    return Trainer(Digits(dropout), args, **options)


def main() -> None:
    """Train, and print the highest loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/flight/a")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--resume", metavar="CHECKPOINT", help="go on from it, with this dropout")
    parser.add_argument("--exclude", metavar="FILE", help="a list of samples to leave out")
    options = parser.parse_args()
    set_seed(0)
    digits = load_digits()
    pixels, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    for index in SPOILED:
        pixels[index] = 50 * torch.rand(8, 8)
        labels[index] = (labels[index] + 1) % 10
    data = [{"pixels": each, "labels": label} for each, label in zip(pixels, labels, strict=True)]
    args = TrainingArguments(
        options.output_dir, max_steps=options.steps, per_device_train_batch_size=32, learning_rate=1e-3, save_steps=20,
        logging_steps=1, report_to="none",
    )  # fmt: skip
    trainer = make(
        args, options.dropout, train_dataset=data, flight_log=FlightLog(sample_losses=sample_losses),
        exclude_samples=options.exclude,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=options.resume)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    step = max(range(20, options.steps + 1), key=losses.__getitem__)
    print(f"The highest loss after step 19 is {losses[step]:.3f}, in step {step}.")


if __name__ == "__main__":
    main()
