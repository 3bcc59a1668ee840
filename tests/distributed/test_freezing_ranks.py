"""Freeze on two processes: each strategy trains what one process trains, also in a run that is resumed twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.resuming import StopAt
from support.tiny import Net, make_arguments, make_rows

from hftrain import Freeze, Trainer, set_seed

pytestmark = pytest.mark.distributed

STRATEGIES = ("ddp", "fsdp")


def train(folder: Path, strategy: str, *callbacks: Any, resumes: bool = False, **options: Any) -> list[Any]:
    set_seed(3)
    args = make_arguments(folder, max_steps=12, learning_rate=0.1, weight_decay=0.1, optim="sgd", **options)
    freeze = Freeze({"layers.0": "1ep", "layers.1.weight": None})
    trainer = Trainer(Net(), args, train_dataset=make_rows(32), callbacks=[freeze, *callbacks], strategy=strategy)
    try:
        trainer.train(resume_from_checkpoint=resumes)
        return [value.flatten().tolist() for value in trainer.strategy.model_state(trainer.model_wrapped).values()]
    finally:
        trainer.strategy.close()


def train_each(folder: str) -> dict[str, Any]:
    found = {}
    for name in STRATEGIES:
        for at in (3, 4, None):
            parts = train(
                Path(folder) / name / "parts", name, StopAt(at), resumes=at != 3, per_device_train_batch_size=4
            )
        found[name] = train(Path(folder) / name / "whole", name, per_device_train_batch_size=4), parts
    return found


def test_trains_as_one_process_does_and_continues_exactly_twice(tmp_path: Path, run_distributed: Any) -> None:
    alone = train(tmp_path / "alone", "single", per_device_train_batch_size=8)
    assert set(alone[2]) == {1.0}  # frozen for good
    for name, (whole, parts) in run_distributed(train_each, folder=str(tmp_path))[0].items():
        assert parts == whole, name
        for ours, theirs in zip(whole, alone, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), name
