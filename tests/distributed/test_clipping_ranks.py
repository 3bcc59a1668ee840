"""GradientClipping on two processes: what one process does with both batches, whole or sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.resuming import StopAt
from support.tiny import Net, make_arguments, make_rows

from hftrain import GradientClipping, Trainer, set_seed

pytestmark = pytest.mark.distributed

KINDS = ("value", "group", "adaptive")


def train(folder: Path, kind: str, strategy: str, *callbacks: Any, resumes: bool = False, **options: Any) -> list[Any]:
    set_seed(3)
    args = make_arguments(
        folder, max_grad_norm=0.0, max_steps=6, learning_rate=0.1, weight_decay=0.1, optim="sgd",
        gradient_accumulation_steps=2, **options,
    )  # fmt: skip
    callbacks = (GradientClipping(kind, 0.01), *callbacks)
    trainer = Trainer(Net(), args, train_dataset=make_rows(48), callbacks=callbacks, strategy=strategy)
    try:
        trainer.train(resume_from_checkpoint=resumes)
        return [value.flatten().tolist() for value in trainer.strategy.model_state(trainer.model_wrapped).values()]
    finally:
        trainer.strategy.close()


def train_each(folder: str) -> dict[str, Any]:
    """Train with each type and strategy, some in three parts."""
    size = {"per_device_train_batch_size": 2}
    found = {f"{s} {k}": train(Path(folder) / s / k, k, s, **size) for s in ("ddp", "fsdp") for k in KINDS}
    for at in (2, 4, None):
        parts = train(Path(folder) / "parts", "adaptive", "fsdp", StopAt(at), resumes=at != 2, **size)
    found["parts"] = parts
    return found


def test_clips_as_one_process_does_and_continues_exactly_twice(tmp_path: Path, run_distributed: Any) -> None:
    found = run_distributed(train_each, folder=str(tmp_path))[0]
    assert found["parts"] == found["fsdp adaptive"]
    for kind in KINDS:
        alone = train(tmp_path / "alone" / kind, kind, "single", per_device_train_batch_size=4)
        for strategy in ("ddp", "fsdp"):
            for ours, theirs in zip(found[f"{strategy} {kind}"], alone, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), (strategy, kind)
