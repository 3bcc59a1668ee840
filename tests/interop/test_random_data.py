"""Random numbers of the data and of the model are drawn in the order of transformers' Trainer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.tiny import make_rows
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

transformers = pytest.importorskip("transformers")

import hftrain  # noqa: E402

pytestmark = pytest.mark.interop


def disturb(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "x": row["x"] + random.gauss(0, 1) + float(numpy.random.normal()) + torch.randn(())}


class Augmented(Dataset[Any]):
    def __init__(self, num: int = 24) -> None:
        self.rows = make_rows(num)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return disturb(self.rows[index])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        rows = make_rows(24)
        while rows:
            yield disturb(rows.pop(random.randrange(min(5, len(rows)))))

    def __len__(self) -> int:
        return 24


def mask(rows: list[Any]) -> Any:
    batch = default_collate(rows)
    return {**batch, "x": torch.where(torch.rand(batch["x"].shape) < 0.3, 0.0, batch["x"] * random.random())}


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(dropout), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x.float())
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(
    package: Any,
    folder: Path,
    *callbacks: Any,
    prepares: bool = False,
    data: Any = Augmented,
    dropout: float = 0.3,
    **options: Any,
) -> list[float]:
    """Train an epoch and a half, and return the logged losses."""

    class Own(package.Trainer):
        def get_train_dataloader(self) -> Any:
            if not prepares:
                return super().get_train_dataloader()
            workers = self.args.dataloader_num_workers
            loader = DataLoader(self.train_dataset, batch_size=4, shuffle=True, collate_fn=mask, num_workers=workers)
            return self.accelerator.prepare(loader)

    transformers.set_seed(0)
    model = Net(dropout)
    settings = {"learning_rate": 0.1, "per_device_train_batch_size": 4, "num_train_epochs": 1.5, "logging_steps": 1}
    settings |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", **options}
    args = package.TrainingArguments(str(folder), **settings)
    trainer = Own(model, args, train_dataset=data(), data_collator=mask, callbacks=[*callbacks])
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("options", [{}, {"prepares": True}], ids=str)
def test_random_data_are_those_of_transformers(tmp_path: Path, accumulation: int, options: dict[str, Any]) -> None:
    options = {**options, "gradient_accumulation_steps": accumulation}
    ours = train(hftrain, tmp_path / "ours", **options)
    assert len(ours) == {1: 9, 3: 3}[accumulation]
    assert ours == pytest.approx(train(transformers, tmp_path / "theirs", **options), abs=1e-6)


def test_random_streams_are_those_of_transformers_if_only_they_draw(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": Stream, "dropout": 0.0, "num_train_epochs": 2.5}
    ours = train(hftrain, tmp_path / "ours", **options)
    assert ours == pytest.approx(train(transformers, tmp_path / "theirs", **options), abs=1e-6)
