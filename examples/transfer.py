"""Classify the digits 5 to 9 with a backbone that was trained on 0 to 4, frozen for the first epochs.

After Lightning's example of fine-tuning in computer vision.

python examples/transfer.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from hftrain import Freeze, StepOutput, TaskModule, Trainer, TrainingArguments, layerwise_groups, set_seed


class Classifier(TaskModule):
    """A backbone and a head with a rate of its own."""

    def __init__(self, backbone: nn.Module | None = None) -> None:
        made = backbone or nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()
        )
        super().__init__(nn.ModuleDict({"backbone": made, "head": nn.Linear(64, 5)}))
        self.accuracy = MulticlassAccuracy(5, average="micro")

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        logits = self.model["head"](self.model["backbone"](batch["pixels"]))
        self.accuracy.update(logits, batch["labels"])
        return StepOutput(loss=nn.functional.cross_entropy(logits, batch["labels"]), outputs=logits)

    evaluation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(layerwise_groups(self.model, lr=3e-3, rates={"backbone": 0.1}, weight_decay=0.0))


def train(task: Classifier, digits: range, folder: str, epochs: int, *callbacks: Freeze) -> float:
    """Train on 4 of 5 scans of some digits; return the accuracy on the others."""
    scans = load_digits()
    data = [
        {"pixels": torch.tensor(image.flatten() / 16, dtype=torch.float32), "labels": digits.index(label)}
        for image, label in zip(scans.images, scans.target.tolist(), strict=True)
        if label in digits
    ]
    args = TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        eval_strategy="epoch",
        report_to="none",
    )
    half = len(data) * 4 // 5
    trainer = Trainer(task, args, train_dataset=data[:half], eval_dataset=data[half:], callbacks=[*callbacks])
    trainer.train()
    return float(trainer.evaluate()["eval_accuracy"])


def main() -> None:
    """Train on five digits, then fine-tune on the five others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--output-dir", default="runs/transfer")
    options = parser.parse_args()
    set_seed(0)
    source = Classifier()
    before = train(source, range(5), f"{options.output_dir}/source", options.epochs)
    target = Classifier(source.model["backbone"])
    after = train(target, range(5, 10), f"{options.output_dir}/target", options.epochs, Freeze("backbone", until="2ep"))
    print(f"Accuracy: {before:.1%} on 0 to 4, {after:.1%} on 5 to 9")


if __name__ == "__main__":
    main()
