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
    """Changes what trains after the first update, or within the second; "late" trains it from the third update on."""

    def __init__(self, change: str, rank: int | None = None) -> None:
        self.change = change
        self.rank = rank

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.change == "within" and state.global_step == 1:
            kwargs["model"].layers[0].requires_grad_(True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self.change == "late" and state.global_step == 2:
            optimizer.add_param_group({"params": list(model.layers[0].parameters())})
        if state.global_step != 1 or self.change == "within" or self.rank not in (None, args.process_index):
            return
        if self.change in ("thaw", "swap", "late"):
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


class Late(Trainer):
    """Trains frozen parameters only when they are added to the optimizer."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        return self.optimizer


def train(folder: str, change: str, *, batch_size: int = 4, rank: int | None = None, **options: Any) -> dict[str, Any]:
    set_seed(7)
    model = Net()
    model.layers[0].requires_grad_(change == "freeze")
    arguments = make_arguments(
        Path(folder),
        max_steps=4,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=batch_size,
        max_grad_norm=0.3 if change == "late" else 0,
        learning_rate=0.1,
    )
    kind = Late if change == "late" else Own
    trainer = kind(model, arguments, train_dataset=make_rows(64), callbacks=[Thaws(change, rank)], **options)
    trainer.train()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
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
    *([strategy, change] for strategy in ("ddp", "fsdp") for change in ("thaw", "freeze", "swap", "within", "late")),
    ["views", "swap"],
    ["views", "within"],
    ["ddp", "grow"],
]


@pytest.mark.filterwarnings("ignore:layers.0.weight, layers.0.bias are no longer frozen")
def test_processes_train_what_requires_a_gradient_now(tmp_path: Path, run_distributed: Any) -> None:
    both = run_distributed(train_all, folder=str(tmp_path / "two"), cases=CASES)
    alone = {
        change: train(str(tmp_path / change), change, batch_size=8)
        for change in ("thaw", "freeze", "swap", "within", "late")
    }
    for (strategy, change), mine, others in zip(CASES, *both, strict=True):
        case = f"{strategy}, {change}"
        assert mine["losses"] == others["losses"], case
        # Of a split model only the main process gathers the weights.
        assert not others["weights"] or mine["weights"] == others["weights"], case
        if change != "grow":  # which draws other weights on each rank, to be made the same
            assert mine["losses"] == pytest.approx(alone[change]["losses"], rel=1e-5), case
            assert mine["norms"] == pytest.approx(alone[change]["norms"], rel=1e-4), case
            for found, expected in zip(mine["weights"], alone[change]["weights"], strict=True):
                torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-6, msg=case)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("change", "rank"), [("thaw", 1), ("grow", 0)])
def test_rank_that_changes_alone_what_trains_is_named(
    tmp_path: Path, launch_distributed: Any, strategy: str, change: str, rank: int
) -> None:
    kwargs = {"folder": str(tmp_path), "change": change, "rank": rank, "strategy": strategy}
    run = launch_distributed(train, kwargs=kwargs, forks=True)
    assert run.returncode == 1, run.output
    if strategy == "fsdp" and change == "grow":
        assert "Cannot add 'layers.3.weight'" in run.output
    else:
        name = "layers.0.weight" if change == "thaw" else "layers.3.weight"
        assert f"Rank {rank}: trains '{name}'" in run.output
        assert f"rank {1 - rank}: no change" in run.output
    assert f"[rank{1 - rank}]: ended, because rank {rank} failed: StrategyError" in run.output
