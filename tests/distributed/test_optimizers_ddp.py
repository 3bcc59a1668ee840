"""Optimizers that update during the backward pass, on two real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.optimizer_runs import make_run

pytestmark = [pytest.mark.distributed, pytest.mark.optimizers]


def train(folder: str, *, optim: str, **options: Any) -> list[list[float]]:
    trainer = make_run(Path(folder), optim, save_strategy="no", **options)
    trainer.train()
    return [p.flatten().tolist() for p in trainer.model.parameters()]


def test_lomo_trains_on_two_processes_like_descent_on_one(tmp_path: Path, run_distributed: Any) -> None:
    both = run_distributed(train, folder=str(tmp_path), optim="lomo", per_device_train_batch_size=2, max_grad_norm=0.1)
    alone = train(str(tmp_path), optim="sgd", max_grad_norm=0.1)
    assert both[0] == both[1]
    for ours, theirs in zip(both[0], alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
