"""A schedule of the accumulation on two processes: the weights of one process with the same batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import GradientAccumulationScheduler, Trainer, set_seed

pytestmark = pytest.mark.distributed


def train(folder: str, batch_size: int, **options: Any) -> dict[str, list[Any]]:
    set_seed(3)
    args = make_arguments(
        f"{folder}/out",
        max_steps=6,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=3,
        save_strategy="no",
        data_seed=1,
    )
    callback = GradientAccumulationScheduler({0: 1, 2: 3, 4: 2})
    trainer = Trainer(Net(), args, train_dataset=make_rows(48), callbacks=[callback], **options)
    trainer.train()
    found = {name: value.tolist() for name, value in trainer.model.state_dict().items()}
    trainer.strategy.close()
    return found


def test_ranks_follow_the_schedule(tmp_path: Any, run_distributed: Any) -> None:
    ranks = run_distributed(train, folder=str(tmp_path), batch_size=2, strategy="ddp")
    alone = train(str(tmp_path / "alone"), batch_size=4)
    for found in ranks:
        for name, weights in alone.items():
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(weights), rtol=1e-5, atol=1e-6)
