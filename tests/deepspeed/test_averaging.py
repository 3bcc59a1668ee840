"""Averaged weights under DeepSpeed: of whole parameters, saved and resumed; refused where ZeRO-3 splits them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from support.gan import Gan
from support.gan import make as make_gan
from support.tiny import Net, make_trainer

from hftrain import EMA, StrategyError, set_seed

pytestmark = pytest.mark.deepspeed


def train(folder: str, stage: int, resume: int | None = None) -> Any:
    set_seed(0)
    settings: Any = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2}
    settings["deepspeed"] = {"zero_optimization": {"stage": stage}}
    trainer = make_trainer(Path(folder), Net(), EMA(0.8), **settings)
    trainer.train(resume_from_checkpoint=resume and f"{folder}/checkpoint-{resume}")
    found = [p.detach().flatten().tolist() for p in trainer.model.parameters()]
    trainer.strategy.close()
    return found


def train_each(folder: str) -> list[bool]:
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed's use of torch
    found = []
    for stage in (1, 2):
        whole = train(f"{folder}/{stage}", stage)
        found += [train(f"{folder}/{stage}", stage, step) == whole for step in (2, 3)]
    with pytest.raises(StrategyError, match=r"EMA.averages"):
        train(folder, 3)
    with pytest.raises(StrategyError, match="its engine steps one optimizer"):
        make_gan(Path(folder), Gan(), deepspeed={"zero_optimization": {"stage": 1}}).train()
    return found


def test_averages_are_exact_or_refused(tmp_path: Path, run_distributed: Any) -> None:
    assert run_distributed(train_each, folder=str(tmp_path)) == [[True] * 4] * 2
