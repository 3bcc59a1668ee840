"""Tell points on three spiral arms apart, in a run that may be stopped at any time; see examples/preemption.py.

python examples/train_on_cluster.py [FOLDER]
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from hftrain import TaskModule, Trainer, TrainingArguments, set_seed


class Spirals(TaskModule):
    """Cross-entropy of the arm."""

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean over the points."""
        return nn.functional.cross_entropy(self.model(batch["point"]), batch["labels"])


def main(output_dir: str = "runs/train_on_cluster") -> None:
    """Start a new run in the folder, or go on with the one that is there."""
    set_seed(0)
    arm, turn = torch.arange(1500) % 3, torch.rand(1500)
    angle = 6 * turn + 2.1 * arm + 0.2 * torch.randn(1500)
    points = turn[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    layers = [nn.Linear(2, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3)]
    args = TrainingArguments(
        output_dir,
        max_steps=400,
        per_device_train_batch_size=64,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        logging_steps=5,
        save_steps=100,
        save_total_limit=1,
        disable_tqdm=True,
        report_to="none",
    )
    data = [{"point": point, "labels": label} for point, label in zip(points, arm, strict=True)]
    trainer = Trainer(Spirals(nn.Sequential(*layers)), args, train_dataset=data)
    trainer.train(resume_from_checkpoint="auto")


if __name__ == "__main__":
    main(*sys.argv[1:])
