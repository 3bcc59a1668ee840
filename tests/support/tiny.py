"""Tiny tasks, models and data that train in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from hftrain import StepOutput, TaskModule, TrainingArguments

Rows = list[dict[str, torch.Tensor]]


class Net(nn.Module):
    """A plain module by the documented rules: loss first when labels are given."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        logits = self.layers(x)
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


class Task(TaskModule):
    """The same network as a task."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(Net(dropout))

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        loss, logits = self.model(**batch)
        return StepOutput(loss=loss, outputs=logits, labels=batch["labels"])


class Noisy(Dataset[dict[str, torch.Tensor]]):
    """Samples that draw a random number each time they are read."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {**row, "x": row["x"] + 0.1 * torch.randn(4)}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same samples without a length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def make_rows(num: int = 22, seed: int = 1) -> Rows:
    """Return samples of {"x": 4 floats, "labels": class 0, 1 or 2}."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(4, generator=generator), "labels": torch.randint(0, 3, (), generator=generator)}
        for _ in range(num)
    ]


def make_arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Return arguments for a silent run that logs every step and saves nothing."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "use_cpu": True,
    }
    return TrainingArguments(str(folder), **{**defaults, **options})
