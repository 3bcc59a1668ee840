"""Opacus: an optimizer that clips the gradient of each sample, without noise, so that two runs can be compared."""

from __future__ import annotations

from typing import Any

import torch
from scripts.parts import ARGUMENTS, SeedEachStep, fit
from torch import nn


class Net(nn.Module):
    """A classifier that returns its loss first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **more: Any) -> tuple[torch.Tensor, ...]:
        """Return the loss, a mean over samples, and the logits."""
        logits = self.layers(x)
        return (nn.functional.cross_entropy(logits, labels), logits)


# The wrapper's forward takes any argument.
WRAPPED: dict[str, Any] = {"remove_unused_columns": False, "label_names": ["labels"]}


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return made-up samples."""
    generator = torch.Generator().manual_seed(seed)
    points, labels = torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)
    return [{"x": point, "labels": label} for point, label in zip(points, labels, strict=True)]


def train(folder: str, **settings: Any) -> dict[str, Any]:
    """Train with the gradients of half of the samples clipped."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer
    from transformers import Trainer, TrainingArguments

    class PrivateTrainer(Trainer):
        loss_is_scaled_for_ga = True

    class ClearGradients(SeedEachStep):
        """transformers clears the gradients through the model, which leaves Opacus' own."""

        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            optimizer.zero_grad()

    torch.manual_seed(0)
    model = GradSampleModule(Net())
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), noise_multiplier=0.0, max_grad_norm=0.8, expected_batch_size=4
    )
    trainer = PrivateTrainer(
        model=model,
        args=TrainingArguments(folder, **{**ARGUMENTS, **settings}, max_grad_norm=0.0, save_only_model=True, **WRAPPED),
        train_dataset=rows(26, 1),
        eval_dataset=rows(8, 2),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        callbacks=[ClearGradients()],
    )
    return fit(trainer)
