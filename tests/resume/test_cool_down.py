"""A checkpoint of a run with a constant rate becomes the start of its decay, as if it had been planned so."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt, assert_same, outcome
from support.tiny import Net, make_resumable

from hftrain import set_seed


def make(folder: Path, model: torch.nn.Module, *, max_steps: Any, decay: int, stop: int | None = None) -> Any:
    return make_resumable(
        folder,
        StopAt(stop),
        model=copy.deepcopy(model),
        max_steps=max_steps,
        warmup_steps="2ba",
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": decay},
        save_steps=4,
    )


@pytest.mark.parametrize("start", [4, 8])
def test_cool_down_is_that_of_a_run_planned_so_and_resumes_exactly_twice(tmp_path: Path, start: int) -> None:
    set_seed(3)
    model = Net(dropout=0.2)
    planned = make(tmp_path / "planned", model, max_steps=start + 5, decay=5)
    planned.train()
    make(tmp_path / "long", model, max_steps=40, decay=10, stop=16).train()
    checkpoint, folder = str(tmp_path / f"long/checkpoint-{start}"), tmp_path / "cooled"
    make(folder, model, max_steps=f"{start + 5}ba", decay=5, stop=start + 2).train(resume_from_checkpoint=checkpoint)
    make(folder, model, max_steps=start + 5, decay=5, stop=start + 3).train(resume_from_checkpoint=True)
    cooled = make(folder, model, max_steps=start + 5, decay=5)
    cooled.train(resume_from_checkpoint=True)
    assert_same(outcome(cooled), outcome(planned))
    rates = [entry["learning_rate"] for entry in cooled.state.log_history if "learning_rate" in entry]
    assert rates[start - 1] == rates[start] == 0.01 > rates[start + 1] > rates[-1] > 0
