"""The schedule that follows the evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import make_arguments, make_rows, train
from torch import nn
from torch.optim import SGD

from hftrain import ConfigError, GreedyLR


def test_greedy_follows_the_evaluations_and_is_resumed(tmp_path: Path) -> None:
    options = {"patience": 0, "min_lr": 1e-4, "factor": 0.5, "threshold": 10.0}
    arguments: dict[str, Any] = {
        "max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2,
        "lr_scheduler_type": "greedy", "lr_scheduler_kwargs": options,
    }  # fmt: skip
    trainer = train(tmp_path, eval_dataset=make_rows(5), **arguments)
    assert isinstance(trainer.lr_scheduler, GreedyLR)
    # The first loss beats infinity, and none of the others beats it by 10.
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(2e-2 / 8)
    resumed = train(tmp_path, eval_dataset=make_rows(5), **arguments, resume=str(tmp_path / "checkpoint-2"))
    assert resumed.lr_scheduler.state_dict() == trainer.lr_scheduler.state_dict()


def test_greedy_needs_evaluations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="follows an evaluation metric"):
        make_arguments(tmp_path, lr_scheduler_type="greedy")
    with pytest.raises(ValueError, match="max_lr has 2 values"):
        GreedyLR(SGD([nn.Parameter(torch.ones(1))], lr=1.0), max_lr=[1.0, 1.0])
