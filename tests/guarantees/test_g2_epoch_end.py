"""G2 where a checkpoint was taken at a step that ends a pass, before what comes at the end of the pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.resuming import assert_same, outcome
from support.tiny import Net, make_arguments, make_rows

from hftrain import Trainer, TrainerCallback, set_seed


def make(folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    """Return a trainer of three epochs of 7 steps."""
    set_seed(1)
    defaults = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 7, "eval_strategy": "epoch"}
    arguments = make_arguments(folder, **{**defaults, **options})
    return Trainer(
        Net(dropout=0.2),
        arguments,
        train_dataset=make_rows(26),
        eval_dataset=make_rows(8),
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_log_that_is_due_at_the_end_of_a_pass_is_that_of_its_last_step(tmp_path: Path, max_grad_norm: float) -> None:
    options = {"logging_strategy": "epoch", "max_grad_norm": max_grad_norm}
    whole, resumed = make(tmp_path, **options), make(tmp_path, **options)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert_same(outcome(resumed), outcome(whole))
