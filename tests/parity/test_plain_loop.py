"""Losses, gradient norms, learning rates and weights per step equal those of a loop written by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Rows, Task, make_rows, make_trainer
from torch import nn

from hftrain import default_data_collator, set_seed
from hftrain.optim.groups import decay_parameter_names

TOLERANCE = {"rel": 1e-6, "abs": 1e-7}


def batches_of(rows: Rows, epoch: int, size: int, seed: int = 42) -> list[dict[str, torch.Tensor]]:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    return [
        default_data_collator([rows[i] for i in order[start : start + size]]) for start in range(0, len(rows), size)
    ]


def plain_loop(
    model: nn.Module,
    rows: Rows,
    *,
    accumulation: int,
    num_epochs: int,
    warmup: int,
    weight_decay: float,
    max_norm: float,
) -> list[dict[str, float]]:
    """Train with AdamW on the documented groups, a linear schedule with warm-up, and clipping."""
    decaying = set(decay_parameter_names(model))
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if n in decaying], "weight_decay": weight_decay},
            {"params": [p for n, p in named if n not in decaying], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    steps_per_epoch = math.ceil(math.ceil(len(rows) / 4) / accumulation)
    total = steps_per_epoch * num_epochs
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: s / max(1, warmup) if s < warmup else max(0.0, (total - s) / max(1, total - warmup))
    )
    history = []
    for epoch in range(num_epochs):
        batches = batches_of(rows, epoch, 4)
        for start in range(0, len(batches), accumulation):
            window = batches[start : start + accumulation]
            num_items = sum(len(batch["labels"]) for batch in window)
            mean = 0.0
            for batch in window:
                loss = model(**batch)[0] * (len(batch["labels"]) / num_items)
                loss.backward()
                mean += loss.item()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            rate = schedule.get_last_lr()[0]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            history.append({"loss": mean, "grad_norm": norm.item(), "learning_rate": rate})
    return history


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", [Task, Net])
def test_training_equals_a_plain_loop(tmp_path: Path, kind: Any, accumulation: int) -> None:
    rows = make_rows(22)
    set_seed(3)
    model = Net()
    settings = {"accumulation": accumulation, "num_epochs": 3, "warmup": 3, "weight_decay": 0.1, "max_norm": 0.5}
    expected_model = Net()
    expected_model.load_state_dict(model.state_dict())
    expected = plain_loop(expected_model, rows, **settings)

    task = model
    if kind is Task:
        task = Task()
        task.model = model
    trainer = make_trainer(
        tmp_path, task, train_dataset=rows, num_train_epochs=3, gradient_accumulation_steps=accumulation,
        warmup_steps=3, weight_decay=0.1, max_grad_norm=0.5,
    )  # fmt: skip
    output = trainer.train()

    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == list(range(1, len(expected) + 1))
    for ours, theirs in zip(logged, expected, strict=True):
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, **TOLERANCE), (ours, theirs)
    for name, weight in trainer.model.state_dict().items():
        torch.testing.assert_close(weight, expected_model.state_dict()[name], rtol=1e-6, atol=1e-7)
    assert output.training_loss == pytest.approx(sum(entry["loss"] for entry in expected) / len(expected), **TOLERANCE)
