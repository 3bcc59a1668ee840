"""Resuming without the data that was seen: documented to start the epoch's data over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import Trainer


class Recorder(Trainer):
    """Keeps what it trains on."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        vars(self).setdefault("seen", []).append(inputs["x"].tolist())
        return super().training_step(model, inputs, num_items_in_batch)


def run(folder: Path, *, resume: str | None = None, **options: Any) -> list[Any]:
    args = make_arguments(folder, num_train_epochs=1, save_strategy="steps", save_steps=2, **options)
    trainer = Recorder(Net(), args, train_dataset=make_rows())
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == 6
    return list(vars(trainer)["seen"])


@pytest.mark.parametrize(("ignores", "first"), [(False, 2), (True, 0)])
def test_resume_skips_the_data_seen_unless_told_not_to(tmp_path: Path, ignores: bool, first: int) -> None:
    whole = run(tmp_path)
    rest = run(tmp_path, resume=str(tmp_path / "checkpoint-2"), ignore_data_skip=ignores)
    assert len(rest) == 4
    assert rest[0] == whole[first]
