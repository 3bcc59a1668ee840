"""What is told before a training, and what is left to those who make it themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows

from hftrain import ConfigError, TaskError, Trainer


class Reader(Net):
    """Takes a text next to the numbers."""

    def forward(self, x: torch.Tensor, text: Any, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return super().forward(x, labels)


class Own(Task):
    """Makes its optimizer and its schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


class Scheduling(Trainer):
    """Makes its schedule, for the optimizer of the arguments."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return self.lr_scheduler


def test_text_in_a_list_of_samples_makes_no_column(tmp_path: Path) -> None:
    rows = [{**row, "text": "a word"} for row in make_rows(8)]
    with pytest.raises(TaskError, match=r"Reader\.forward needs text, and the columns that make a batch are labels, x"):
        Trainer(Reader(), make_arguments(tmp_path), train_dataset=rows).train()


def test_schedule_of_the_arguments_is_tried_only_where_it_is_made(tmp_path: Path) -> None:
    # It lacks what it needs: min_lr.
    arguments = make_arguments(tmp_path, lr_scheduler_type="cosine_with_min_lr", max_steps=2)
    with pytest.raises(ConfigError, match="Cannot build a cosine schedule with a minimum"):
        Trainer(Task(), arguments, train_dataset=make_rows(8)).train()
    assert Trainer(Own(), arguments, train_dataset=make_rows(8)).train().global_step == 2
    assert Scheduling(Net(), arguments, train_dataset=make_rows(8)).train().global_step == 2


def test_model_without_anything_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot train Net: none of its parameters requires a gradient"):
        Trainer(Net().requires_grad_(False), make_arguments(tmp_path), train_dataset=make_rows(8)).train()
