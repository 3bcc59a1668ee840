"""Find circles, squares and triangles in pictures, pixel by pixel, with a small U-Net.

python examples/segmentation.py
torchrun --nproc_per_node 2 examples/segmentation.py
"""

from __future__ import annotations

import math
import random
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torchmetrics.classification import MulticlassJaccardIndex

from hftrain import StepOutput, SummaryCallback, TaskModule, Trainer, TrainingArguments, set_seed

NAMES = ("background", "circle", "square", "triangle")
SIZE = 32


# %% data
def draw(seed: int) -> dict[str, torch.Tensor]:
    """Return {"pixels": float [1, 32, 32], "mask": int64 [32, 32]} with two or three shapes."""
    rng = random.Random(seed)
    picture, mask = Image.new("L", (SIZE, SIZE), rng.randrange(60)), Image.new("L", (SIZE, SIZE))
    for _ in range(rng.randint(2, 3)):
        shape, radius, turn = rng.randint(1, 3), rng.uniform(5, 9), rng.uniform(0, math.tau)
        x, y = (rng.uniform(radius, SIZE - radius) for _ in range(2))
        corners = {1: 30, 2: 4, 3: 3}[shape]
        angles = [turn + math.tau * corner / corners for corner in range(corners)]
        points = [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles]
        ImageDraw.Draw(picture).polygon(points, rng.randrange(100, 256))
        ImageDraw.Draw(mask).polygon(points, shape)
    noise = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    pixels = torch.tensor(np.asarray(picture)) / 255 + 0.1 * noise
    return {"pixels": pixels[None], "mask": torch.tensor(np.asarray(mask)).long()}


train_set, eval_set = [draw(seed) for seed in range(1200)], [draw(seed) for seed in range(10_000, 10_200)]


# %% model
def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions that keep height and width."""
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Halve the resolution at each width, then double it again; returns logits [batch, class, height, width]."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = [*pairwise(widths)]
        self.down = nn.ModuleList(convolutions(*pair) for pair in [(1, widths[0]), *pairs[:-1]])
        self.bottom = convolutions(*pairs[-1])
        self.up = nn.ModuleList(convolutions(narrow + wide, narrow) for narrow, wide in reversed(pairs))
        self.head = nn.Conv2d(widths[0], len(NAMES), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep what each resolution saw, and hand it to the same resolution on the way up."""
        kept = []
        for layer in self.down:
            kept.append(layer(x))
            x = nn.functional.max_pool2d(kept[-1], 2)
        x = self.bottom(x)
        for layer in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = layer(torch.cat([x, kept.pop()], dim=1))
        return self.head(x)


# %% task
class Segment(TaskModule):
    """Cross-entropy of the pixels, and the mean IoU (intersection over union) of the classes."""

    def __init__(self) -> None:
        super().__init__(UNet(8, 16, 32, 64))
        self.iou = MulticlassJaccardIndex(len(NAMES))

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy of the pixels."""
        return nn.functional.cross_entropy(self.model(batch["pixels"]), batch["mask"])

    def evaluation_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        """Return the same loss, and update the IoU."""
        logits = self.model(batch["pixels"])
        self.iou.update(logits, batch["mask"])
        return StepOutput(loss=nn.functional.cross_entropy(logits, batch["mask"]))

    def prediction_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the class of each pixel, uint8 [batch, height, width]."""
        return self.model(batch["pixels"]).argmax(dim=1).byte()


# %% train
set_seed(0)
trainer = Trainer(
    Segment(),
    TrainingArguments(
        "runs/segmentation",
        num_train_epochs=4,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=100,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        logging_steps=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="iou",
        greater_is_better=True,
        disable_tqdm=True,
        report_to="none",
    ),
    train_dataset=train_set,
    eval_dataset=eval_set,
    callbacks=[SummaryCallback()],
)
trainer.train()

# %% classes
masks = torch.as_tensor(trainer.predict(eval_set).predictions)
per_class = MulticlassJaccardIndex(len(NAMES), average=None)(masks, torch.stack([each["mask"] for each in eval_set]))
for name, value in zip(NAMES, per_class, strict=True):
    print(f"{name:<10} IoU {value:.3f}")

# %% samples
_, axes = plt.subplots(3, 6, figsize=(7, 3.6), layout="constrained", subplot_kw={"xticks": [], "yticks": []})
for sample, mask, column in zip(eval_set, masks, axes.T, strict=False):
    column[0].imshow(sample["pixels"][0], cmap="gray", interpolation="none")
    column[1].imshow(sample["mask"], cmap="viridis", vmin=0, vmax=3, interpolation="none")
    column[2].imshow(mask, cmap="viridis", vmin=0, vmax=3, interpolation="none")
for axis, title in zip(axes[:, 0], ("picture", "mask", "predicted"), strict=True):
    axis.set_ylabel(title)
plt.savefig("runs/segmentation/masks.svg")
