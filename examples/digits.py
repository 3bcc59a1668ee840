"""Classify scanned handwritten digits: 1,797 images of 8 x 8 pixels that ship with scikit-learn.

python examples/digits.py
python examples/digits.py --stop-after-steps 200
python examples/digits.py --resume
torchrun --nproc_per_node 2 examples/digits.py --strategy ddp --precision bf16
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

from hftrain import StepOutput, SummaryCallback, TaskModule, Trainer, TrainerCallback, TrainingArguments, set_seed

NUM_CLASSES = 10


class Digits(Dataset[dict[str, Any]]):
    """Images and their digits, as {"pixels": float tensor (1, 8, 8) in [0, 1], "labels": int}."""

    def __init__(self, indices: torch.Tensor) -> None:
        scans = load_digits()
        self.pixels = torch.tensor(scans.images[indices] / 16.0, dtype=torch.float32).unsqueeze(1)
        self.labels = scans.target[indices].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixels": self.pixels[index], "labels": self.labels[index]}


class DigitsTask(TaskModule):
    """A small convolutional network, cross-entropy, and accuracy."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(
                nn.Conv2d(1, 32, kernel_size=3, padding=1),
                nn.ReLU(),
                nn.Conv2d(32, 64, kernel_size=3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Dropout(0.25),
                nn.Linear(64 * 4 * 4, 128),
                nn.ReLU(),
                nn.Linear(128, NUM_CLASSES),
            )
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(NUM_CLASSES, average="micro")

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy."""
        return nn.functional.cross_entropy(self.model(batch["pixels"]), batch["labels"])

    def evaluation_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        """Return the mean cross-entropy, and count the correct predictions."""
        logits = self.model(batch["pixels"])
        self.accuracy.update(logits, batch["labels"])
        return StepOutput(loss=nn.functional.cross_entropy(logits, batch["labels"]))

    def prediction_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the digits' probabilities, shape (batch, 10)."""
        return self.model(batch["pixels"]).softmax(dim=-1)


class StopAfter(TrainerCallback):
    """Save and stop after some steps, which simulates a preempted machine."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a save and a stop once the steps are done."""
        if state.global_step == self.num_steps:
            control.should_save = control.should_training_stop = True


def split() -> dict[str, Digits]:
    """Return 1,197 images to train on, 300 to choose the best model by, 300 to test it."""
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    train, evaluation, test = order.split([1197, 300, 300])
    return {"train": Digits(train), "evaluation": Digits(evaluation), "test": Digits(test)}


def draw_curves(history: list[dict[str, Any]], path: Path) -> None:
    """Draw training loss, evaluation loss and accuracy over the epochs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, name, label in (
        (left, "loss", "training"),
        (left, "eval_loss", "evaluation"),
        (right, "eval_accuracy", ""),
    ):
        points = [(entry["epoch"], entry[name]) for entry in history if name in entry]
        axis.plot(*zip(*points, strict=True), label=label)
    left.set(title="Loss", xlabel="epoch")
    left.legend()
    right.set(title="Evaluation accuracy", xlabel="epoch")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_predictions(probabilities: Any, labels: list[int], path: Path) -> None:
    """Write one line per test image: its digit, the prediction and its probability."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["index", "digit", "predicted", "probability"])
        for index, (label, row) in enumerate(zip(labels, probabilities, strict=True)):
            writer.writerow([index, label, int(row.argmax()), f"{row.max():.4f}"])


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/digits"))
    parser.add_argument("--strategy", default=None, help="single, ddp, ... (default: from the launcher)")
    parser.add_argument("--precision", default=None, help="fp32, bf16, fp16, tf32")
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--stop-after-steps", type=int, default=None)
    parser.add_argument("--resume", action="store_true", help="continue the run in --output-dir")
    return parser.parse_args()


def main() -> None:
    """Train, keep the best model, test it, and write its predictions."""
    options = parse()
    set_seed(42)
    data = split()
    stops = [StopAfter(options.stop_after_steps)] if options.stop_after_steps else []
    trainer = Trainer(
        DigitsTask(),
        TrainingArguments(
            str(options.output_dir),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=100,
            learning_rate=2e-3,
            weight_decay=0.01,
            warmup_ratio=0.1,
            lr_scheduler_type="cosine",
            logging_steps=0.1,  # of the run
            eval_strategy="steps",
            eval_steps=0.1,
            save_steps=0.1,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            greater_is_better=True,
        ),
        train_dataset=data["train"],
        eval_dataset=data["evaluation"],
        callbacks=[SummaryCallback(), *stops],
        strategy=options.strategy,
        precision=options.precision,
    )
    result = trainer.train(resume_from_checkpoint=options.resume)
    if result.global_step < trainer.state.max_steps:
        if trainer.is_world_process_zero():
            print(f"Stopped at step {result.global_step} of {trainer.state.max_steps}. Add --resume to continue.")
        return
    metrics = trainer.evaluate(data["test"], metric_key_prefix="test")
    predictions = trainer.predict(data["test"]).predictions
    trainer.save_model(str(options.output_dir / "best"))
    trainer.save_metrics("train", result.metrics, combined=False)
    trainer.save_metrics("test", metrics, combined=False)
    trainer.save_state()
    if trainer.is_world_process_zero():
        draw_curves(trainer.state.log_history, options.output_dir / "curves.png")
        write_predictions(predictions, data["test"].labels, options.output_dir / "predictions.csv")
        print(f"Test accuracy {metrics['test_accuracy']:.1%}. Wrote curves.png and predictions.csv.")


if __name__ == "__main__":
    main()
