"""Parameters that a callback freezes, unfreezes or adds while several processes train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows
from torch import nn

from hftrain import Trainer, TrainerCallback, set_seed
from hftrain.strategies import DDPStrategy

pytestmark = pytest.mark.distributed


class Thaws(TrainerCallback):
    """Changes what trains after the first update, or within the second."""

    def __init__(self, change: str) -> None:
        self.change = change

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.change == "within" and state.global_step == 1:
            kwargs["model"].layers[0].requires_grad_(True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if state.global_step != 1 or self.change == "within":
            return
        if self.change in ("thaw", "swap"):
            model.layers[0].requires_grad_(True)
        if self.change in ("freeze", "swap"):
            model.layers[4].requires_grad_(False)
        if self.change == "grow":
            torch.manual_seed(torch.distributed.get_rank())
            model.layers[3] = nn.Linear(8, 8)
            optimizer.param_groups[0]["params"].extend(model.layers[3].parameters())


class Own(Trainer):
    """Trains all parameters, those that are frozen as soon as they are not."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return self.optimizer


def train(folder: str, change: str, *, batch_size: int = 4, **options: Any) -> dict[str, Any]:
    set_seed(7)
    model = Net()
    model.layers[0].requires_grad_(change == "freeze")
    arguments = make_arguments(
        Path(folder),
        max_steps=4,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=batch_size,
        max_grad_norm=0,
        learning_rate=0.1,
    )
    trainer = Own(model, arguments, train_dataset=make_rows(64), callbacks=[Thaws(change)], **options)
    trainer.train()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": [p.tolist() for p in trainer.strategy.model_state(trainer.model_wrapped).values()],
    }


def train_all(folder: str, cases: list[list[str]]) -> list[dict[str, Any]]:
    found = []
    for strategy, change in cases:
        views = DDPStrategy(use_cpu=True, gradient_as_bucket_view=True)
        found.append(train(f"{folder}/{change}", change, strategy=views if strategy == "views" else strategy))
    return found


# With gradients as views of buckets, those of a half-done step lie in memory of the reducer that is replaced.
CASES = [
    *([strategy, change] for strategy in ("ddp", "fsdp") for change in ("thaw", "freeze", "swap", "within")),
    ["views", "swap"],
    ["views", "within"],
    ["fsdp1", "swap"],
    ["ddp", "grow"],
]


def test_processes_train_what_requires_a_gradient_now(tmp_path: Path, run_distributed: Any) -> None:
    both = run_distributed(train_all, folder=str(tmp_path / "two"), cases=CASES)
    alone = {
        change: train(str(tmp_path / change), change, batch_size=8) for change in ("thaw", "freeze", "swap", "within")
    }
    for (strategy, change), mine, others in zip(CASES, *both, strict=True):
        case = f"{strategy}, {change}"
        assert mine["losses"] == others["losses"], case
        # Of a split model only the main process gathers the weights.
        assert not others["weights"] or mine["weights"] == others["weights"], case
        if change != "grow":  # which draws other weights on each rank, to be made the same
            assert mine["losses"] == pytest.approx(alone[change]["losses"], rel=1e-5), case
            for found, expected in zip(mine["weights"], alone[change]["weights"], strict=True):
                torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-6, msg=case)
