"""Dropout draws the numbers that it draws in transformers' Trainer, and an evaluation changes none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import make_rows
from torch import nn

transformers = pytest.importorskip("transformers")

import hftrain  # noqa: E402

pytestmark = pytest.mark.interop


class DropoutNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(package: Any, folder: Path, *, callbacks: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = DropoutNet()
    options = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 0.05, **options}
    settings = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "eval_strategy": "no", **options}
    args = package.TrainingArguments(str(folder), **settings)
    rows = make_rows(18)
    trainer = package.Trainer(model, args, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)
    trainer.train()
    return model.state_dict()


class KeepNumbers(transformers.TrainerCallback):
    """The callback of docs/from_transformers.md."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.numbers = torch.get_rng_state()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.set_rng_state(self.numbers)


def test_both_are_equal_with_evaluations_if_the_callback_hides_their_draws(tmp_path: Path) -> None:
    for when in ({"eval_strategy": "steps", "eval_steps": 2}, {"eval_strategy": "epoch"}):
        ours = train(hftrain, tmp_path / "ours", **when)
        theirs = train(transformers, tmp_path / "theirs", callbacks=[KeepNumbers()], **when)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
