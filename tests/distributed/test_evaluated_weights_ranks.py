"""`evaluate(ckpt=...)` on two processes, also where they split the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import CheckpointError, Trainer, set_seed

pytestmark = pytest.mark.distributed


def evaluate_each(folder: str, strategy: str) -> list[Any]:
    set_seed(3)
    args = make_arguments(
        folder, max_steps=3, learning_rate=0.5, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1
    )
    rows = make_rows(16)
    trainer = Trainer(Net(), args, train_dataset=rows, eval_dataset=rows, strategy=strategy)
    trainer.train()
    known = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    before = [local(parameter).clone() for parameter in trainer.model.parameters()]
    again = [trainer.evaluate(ckpt=f"{args.output_dir}/checkpoint-{step}")["eval_loss"] for step in (1, 2, 3)]
    is_same = all(map(torch.equal, before, map(local, trainer.model.parameters())))
    try:
        trainer.evaluate(ckpt=f"{folder}/nothing")
    except CheckpointError as error:
        message = str(error)
    trainer.strategy.close()
    return [known, again, is_same, message]


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_strategy_loads_and_puts_back(tmp_path: Path, run_distributed: Any, strategy: str) -> None:
    for known, again, is_same, message in run_distributed(evaluate_each, folder=str(tmp_path), strategy=strategy):
        assert again == known
        assert len(set(known)) == 3
        assert is_same
        assert "It is not a checkpoint" in message
