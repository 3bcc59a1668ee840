"""Muon under DeepSpeed: ZeRO flattens matrices, so it is refused before the first update."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from support.optimizer_runs import Words, make_words
from support.tiny import make_arguments

from hftrain import StrategyError, Trainer

pytestmark = pytest.mark.deepspeed


def train_each(folder: str) -> dict[int, int]:
    """Return how many updates each stage that is refused made."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed's use of torch
    found = {}
    for stage in (1, 2, 3):
        config = {"zero_optimization": {"stage": stage}}
        arguments = make_arguments(Path(folder), optim="muon", max_steps=2, deepspeed=config)
        trainer = Trainer(Words(), arguments, train_dataset=make_words())
        with pytest.raises(StrategyError, match="flattened"):
            trainer.train()
        found[stage] = trainer.state.global_step
        trainer.strategy.close()
    return found


def test_zero_is_refused(tmp_path: Path, run_distributed: Any) -> None:
    for found in run_distributed(train_each, folder=str(tmp_path)):
        assert found == {"1": 0, "2": 0, "3": 0}
