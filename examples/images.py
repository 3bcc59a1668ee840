"""Classify drawings of shapes with a small convolutional network: augmentation, bfloat16, predictions in files.

python examples/images.py
torchrun --nproc_per_node 2 examples/images.py
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy

from hftrain import PredictionWriter, StepOutput, SummaryCallback, TaskModule, Trainer, TrainingArguments, set_seed

# Name and number of corners; every second corner of a star is nearer to its centre.
SHAPES = {"circle": 40, "triangle": 3, "square": 4, "star": 10}
NAMES = tuple(SHAPES)
SIZE = 32


def draw(index: int, seed: int) -> tuple[Image.Image, int]:
    """Return a picture of 32 x 32 pixels with one shape of random place, size, rotation and colour, and its number."""
    rng = random.Random(f"{seed}-{index}")
    background, colour = rng.sample(["crimson", "steelblue", "seagreen", "gold", "black", "white"], 2)
    picture, label = Image.new("RGB", (SIZE, SIZE), background), rng.randrange(len(SHAPES))
    radius, turn, corners = rng.uniform(8, 14), rng.uniform(0, 2 * math.pi), SHAPES[NAMES[label]]
    x, y = (rng.uniform(radius, SIZE - radius) for _ in range(2))
    points = []
    for corner in range(corners):
        distance = radius * (0.45 if NAMES[label] == "star" and corner % 2 else 1)
        angle = turn + 2 * math.pi * corner / corners
        points.append((x + distance * math.cos(angle), y + distance * math.sin(angle)))
    ImageDraw.Draw(picture).polygon(points, colour)
    return picture, label


class Shapes(Dataset[dict[str, torch.Tensor | int]]):
    """Drawings as {"pixels": float tensor (3, 32, 32) in [0, 1], "labels": int}, with or without augmentation."""

    def __init__(self, num_samples: int, *, seed: int, augment: bool = False) -> None:
        self.num_samples, self.seed, self.augment = num_samples, seed, augment

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor | int]:
        picture, label = draw(index, self.seed)
        pixels = torch.tensor(np.asarray(picture)).permute(2, 0, 1) / 255
        if self.augment:
            # torch's random numbers are seeded for each process and epoch, and restored by a resume.
            if torch.rand(()) < 0.5:
                pixels = pixels.flip(-1)
            pixels = (pixels * (0.8 + 0.4 * torch.rand(3, 1, 1)) + 0.05 * torch.randn_like(pixels)).clamp(0, 1)
        return {"pixels": pixels, "labels": label}


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Return a convolution that halves height and width."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class ShapesTask(TaskModule):
    """A convolutional network with cross-entropy and accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            block(3, 32), block(32, 64), block(64, 128), nn.Flatten(), nn.Linear(128 * 16, len(SHAPES))
        )
        self.accuracy = MulticlassAccuracy(len(SHAPES), average="micro")

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy."""
        return nn.functional.cross_entropy(self.model(batch["pixels"]), batch["labels"], label_smoothing=0.1)

    def evaluation_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        """Return the mean cross-entropy, and update the accuracy."""
        logits = self.model(batch["pixels"])
        self.accuracy.update(logits, batch["labels"])
        return StepOutput(loss=nn.functional.cross_entropy(logits, batch["labels"]))

    def prediction_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the probabilities of the shapes, shape (batch, 4)."""
        return self.model(batch["pixels"]).softmax(dim=-1)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/images"))
    parser.add_argument("--precision", default="bf16", help="fp32, bf16, fp16, tf32")
    parser.add_argument("--epochs", type=float, default=15)
    return parser.parse_args()


def main() -> None:
    """Train, evaluate on other drawings, and write predictions for a third set of them."""
    options = parse()
    set_seed(42)
    trainer = Trainer(
        ShapesTask(),
        TrainingArguments(
            str(options.output_dir),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=64,
            per_device_eval_batch_size=256,
            dataloader_num_workers=2,
            dataloader_persistent_workers=True,
            learning_rate=3e-3,
            weight_decay=0.05,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            logging_steps=10,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            report_to="none",
        ),
        train_dataset=Shapes(3000, seed=0, augment=True),
        eval_dataset=Shapes(500, seed=1),
        callbacks=[SummaryCallback(), PredictionWriter(options.output_dir / "predictions")],
        precision=options.precision,
    )
    trainer.train()

    test = Shapes(8, seed=2)
    trainer.predict(test)
    if trainer.is_world_process_zero():
        probabilities = load_file(next((options.output_dir / "predictions").glob("rank0-*.safetensors")))["0/outputs"]
        for row, sample in zip(probabilities, test, strict=False):
            print(f"{NAMES[sample['labels']]:<9} predicted {NAMES[int(row.argmax())]:<9} {float(row.max()):.2f}")


if __name__ == "__main__":
    main()
