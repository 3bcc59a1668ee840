"""Weights that the optimizer trains and the model does not hold, such as a loss's, stay the same on all processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.outside import Heads, OwnLoss
from support.tiny import Net, make_arguments, make_rows

from hftrain import TrainerCallback, set_seed

pytestmark = pytest.mark.distributed


class AddHeads(TrainerCallback):
    """Adds the weights of the loss to the optimizer after the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            optimizer.add_param_group({"params": self.heads.parameters()})


def train(folder: str, *, adds: bool = False, **options: Any) -> list[list[float]]:
    """Train a model and the weights of its loss, which start from other values on each rank; return both."""
    set_seed(3)
    model, heads = Net(), Heads()
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += int(os.environ.get("RANK", "0"))
    callback = AddHeads()
    callback.heads = heads
    trainer = OwnLoss(
        model,
        make_arguments(Path(folder), per_device_train_batch_size=2, **options),
        train_dataset=make_rows(24),
        heads=heads,
        trains_heads=not adds,
        callbacks=[callback] if adds else [],
    )
    trainer.train()
    found = [p for module in (model, heads) for p in module.parameters()]
    return [getattr(p, "full_tensor", lambda p=p: p)().flatten().tolist() for p in found]


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.0}, {"fsdp": "full_shard"}], ids=str)
def test_weights_of_a_loss_train_on_two_processes_as_on_one(
    tmp_path: Path, run_distributed: Any, options: dict[str, Any]
) -> None:
    both = run_distributed(train, folder=str(tmp_path / "two"), **options)
    options.pop("fsdp", None)
    alone = train(str(tmp_path / "one"), gradient_accumulation_steps=2, **options)
    # Ranks take batches in turn, so a step of two ranks has the batches of two micro-steps.
    assert both[0] == both[1]
    for ours, theirs in zip(both[0], alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def test_weights_of_a_loss_that_are_added_in_a_run_are_the_same_on_all_processes(
    tmp_path: Path, run_distributed: Any
) -> None:
    both = run_distributed(train, folder=str(tmp_path), adds=True, lr_scheduler_type="constant")
    assert both[0][-6:] == both[1][-6:]
