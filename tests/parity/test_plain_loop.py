"""Losses, gradient norms, learning rates and weights per step equal those of a loop written by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Rows, Task, make_arguments, make_rows, make_trainer
from torch import nn

from hftrain import ModelTask, StepOutput, TaskModule, Trainer, default_data_collator, set_seed
from hftrain.optim.groups import decay_parameter_names

TOLERANCE = {"rel": 1e-6, "abs": 1e-7}


def batches_of(rows: Rows, epoch: int, size: int, seed: int = 42) -> list[dict[str, torch.Tensor]]:
    """Return an epoch's batches in the documented order."""
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


class WordsTask(TaskModule):
    """A loss that is a mean over the labels other than -100, as language models have it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 5).double())

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        logits = self.model(batch["x"])
        return StepOutput(loss=nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))


def make_ragged(num: int) -> Rows:
    """Return sequences of 6 positions of which a random number is padding (-100)."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for _ in range(num):
        labels = torch.randint(0, 5, (6,), generator=generator)
        labels[int(torch.randint(1, 7, (), generator=generator)) :] = -100
        rows.append({"x": torch.randn(6, 3, generator=generator, dtype=torch.float64), "labels": labels})
    return rows


class Recorder(Trainer):
    """Keep each step's gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.gradients: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)
        self.strategy.clip_grad_norm = self.record  # type: ignore[method-assign]

    def record(self, parameters: Any, max_norm: float) -> torch.Tensor:
        self.gradients.append(torch.cat([p.grad.flatten() for p in parameters]).clone())
        return torch.zeros(())


@pytest.mark.parametrize(("size", "accumulation"), [(12, 1), (4, 3), (2, 6), (1, 12)])
def test_gradient_is_that_of_the_global_mean_however_the_batch_is_split(
    tmp_path: Path, size: int, accumulation: int
) -> None:
    rows = make_ragged(12 + 5)  # the last window of each epoch is short
    set_seed(0)
    task = WordsTask()
    expected = []
    for epoch in range(2):
        order = torch.randperm(17, generator=torch.Generator().manual_seed(42 + epoch)).tolist()
        for window in (order[:12], order[12:]):
            batch = default_data_collator([rows[i] for i in window])
            task.zero_grad()
            task.training_step(batch).loss.backward()
            expected.append(torch.cat([p.grad.flatten() for p in task.model.parameters()]))
    task.zero_grad()
    arguments = make_arguments(
        tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, learning_rate=0.0
    )
    trainer = Recorder(task, arguments, train_dataset=rows)
    trainer.train()
    assert len(trainer.gradients) == len(expected)
    for ours, theirs in zip(trainer.gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_label_smoothing_and_loss_function_divide_by_the_steps_items(tmp_path: Path) -> None:
    rows = make_rows(10)
    seen = []

    def loss_function(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        seen.append(int(num_items_in_batch))
        return nn.functional.cross_entropy(outputs[0], labels, reduction="sum") / num_items_in_batch

    arguments = make_arguments(tmp_path, gradient_accumulation_steps=3, num_train_epochs=1)
    trainer = Trainer(Net(), arguments, train_dataset=rows, compute_loss_func=loss_function)
    trainer.train()
    assert seen == [10, 10, 10]

    set_seed(0)
    model = Net()
    expected = nn.functional.cross_entropy(
        model(torch.stack([row["x"] for row in rows]))[0],
        torch.stack([row["labels"] for row in rows]),
        label_smoothing=0.2,
    )
    arguments = make_arguments(
        tmp_path, gradient_accumulation_steps=3, num_train_epochs=1, label_smoothing_factor=0.2, learning_rate=0.0
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    assert isinstance(trainer.task, ModelTask)
    assert trainer.train().training_loss == pytest.approx(expected.item(), rel=1e-6)
