"""Averaged weights and other declared objects on two processes: as on one, and resumed exactly, also when sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_rows, make_trainer

from hftrain import EMA, Freeze, TrainerCallback, set_seed

pytestmark = pytest.mark.distributed
FSDP = {"fsdp": "full_shard"}


class Second(TrainerCallback):
    """Step the last layer with an optimizer of its own, too."""

    optimizer: Any = None

    def checkpoint_objects(self) -> dict[str, Any]:
        return {} if self.optimizer is None else {"optimizer": self.optimizer}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.optimizer = torch.optim.Adam(kwargs["model"].layers[-1].parameters(), lr=1e-3)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.optimizer.step()


def train(
    folder: str, *, resume: int | None = None, second: bool = False, freezes: bool = False, **options: Any
) -> Any:
    set_seed(0)
    callbacks = [EMA(0.8, every=2), *([Second()] if second else []), *([Freeze("layers.0", 4)] if freezes else [])]
    settings: Any = {
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    settings |= {"per_device_train_batch_size": 2, "eval_dataset": make_rows(9, seed=2), "train_dataset": make_rows(24)}
    trainer = make_trainer(Path(folder), Net(), *callbacks, **settings | options)
    trainer.train(resume_from_checkpoint=resume and f"{folder}/checkpoint-{resume}")
    found = [getattr(p, "full_tensor", lambda p=p: p)().flatten().tolist() for p in trainer.model.parameters()]
    return {"weights": found, "losses": [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]}


@pytest.mark.parametrize("second", [False, True], ids=["average", "optimizer"])
@pytest.mark.parametrize("options", [{}, FSDP, {**FSDP, "bf16": True}], ids=["ddp", "fsdp", "bf16"])
def test_two_processes_average_as_one_and_resume_twice(
    tmp_path: Path, run_distributed: Any, options: dict[str, Any], second: bool
) -> None:
    folder = str(tmp_path / "two")
    both = run_distributed(train, folder=folder, second=second, **options)
    assert both[0] == both[1]
    for step in (3, 4):
        assert run_distributed(train, folder=folder, second=second, resume=step, **options) == both
    alone = {name: value for name, value in options.items() if name != "fsdp"}
    one = train(str(tmp_path / "one"), second=second, **{**alone, "per_device_train_batch_size": 4})
    for ours, theirs in zip(both[0]["weights"], one["weights"], strict=True):
        assert ours == pytest.approx(
            theirs, rel=1e-2 if "bf16" in options else 1e-4, abs=1e-2 if "bf16" in options else 1e-5
        )
    assert both[0]["losses"] == pytest.approx(one["losses"], rel=1e-2)


def test_shards_resume_while_a_part_is_frozen_and_afterwards(tmp_path: Path, run_distributed: Any) -> None:
    """What a checkpoint averages is not what trains when the resumed run begins."""
    settings: Any = {"folder": str(tmp_path), "freezes": True, **FSDP}
    whole = run_distributed(train, **settings)
    for step in (3, 5):
        assert run_distributed(train, resume=step, **settings) == whole


def test_averages_of_two_processes_resume_on_one(tmp_path: Path, run_distributed: Any) -> None:
    folder = str(tmp_path / "two")
    both = run_distributed(train, folder=folder, **FSDP)
    one = train(folder, resume=4, per_device_train_batch_size=4)
    for ours, theirs in zip(one["weights"], both[0]["weights"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
