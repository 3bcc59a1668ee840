"""Try a run out: evaluate a batch first, overfit a few batches, then train and evaluate on a part of the data.

python examples/limits.py
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

    evaluation_step = training_step


def main() -> None:
    """Train with each limit."""
    scans = load_digits()
    pixels, labels = torch.tensor(scans.images / 16, dtype=torch.float32), torch.tensor(scans.target)
    data = [{"pixels": each, "labels": label} for each, label in zip(pixels, labels, strict=True)]
    for name, limits in {
        "overfit": {"overfit_batches": 2},
        "part": {"limit_train_batches": 0.25, "limit_eval_batches": 4, "sanity_eval_batches": 1},
    }.items():
        set_seed(0)
        args = TrainingArguments(
            f"runs/limits/{name}", num_train_epochs=20, per_device_train_batch_size=32, learning_rate=1e-3,
            save_strategy="no", lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = Trainer(Digits(), args, train_dataset=data[:1400], eval_dataset=data[1400:], **limits)
        trainer.train()
        print(f"{name}: {trainer.state.global_step} steps, eval_loss {trainer.evaluate()['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
