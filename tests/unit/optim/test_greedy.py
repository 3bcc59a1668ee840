"""The schedule that follows the evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import make_arguments, make_rows, train

import hftrain
from hftrain import ConfigError

pytestmark = pytest.mark.interop


def test_greedy_follows_the_evaluations_and_is_resumed(tmp_path: Path) -> None:
    options = {"patience": 0, "min_lr": 1e-4, "factor": 0.5, "threshold": 10.0}
    arguments: dict[str, Any] = {
        "max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2,
        "lr_scheduler_type": "greedy", "lr_scheduler_kwargs": options,
    }  # fmt: skip
    trainer = train(tmp_path, eval_dataset=make_rows(5), **arguments)
    assert isinstance(trainer.lr_scheduler, hftrain.GreedyLR)
    # The first loss beats infinity, and none of the others beats it by 10.
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(2e-2 / 8)
    resumed = train(tmp_path, eval_dataset=make_rows(5), **arguments, resume=str(tmp_path / "checkpoint-2"))
    assert resumed.lr_scheduler.state_dict() == trainer.lr_scheduler.state_dict()


def test_greedy_needs_evaluations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="follows an evaluation metric"):
        make_arguments(tmp_path, lr_scheduler_type="greedy")
