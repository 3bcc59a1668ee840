"""The same training twice: with an `Engine`, and written by hand in torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.tiny import Net, Rows, make_rows
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from hftrain import Engine, Strategy
from hftrain.strategies.registry import create_strategy

NUM_STEPS, NUM_MICRO, MAX_NORM = 9, 2, 0.5


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


class Average:
    """The user's own state: a running mean of the losses."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(()), 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.count = state["total"], state["count"]


def train(
    folder: Path,
    *,
    strategy: str | Strategy,
    precision: str = "fp32",
    dropout: float = 0.0,
    num_steps: int = NUM_STEPS,
    save_at: int | None = None,
    shuffle: bool = True,
    batch_size: int = 4,
    rows: Rows | None = None,
    num_workers: int = 0,
) -> dict[str, Any]:
    """Train with an `Engine`, from the newest checkpoint on, and return what is left."""
    with Engine(
        strategy=strategy, precision=precision, seed=3, output_dir=folder, save_total_limit=2, max_grad_norm=MAX_NORM
    ) as engine:
        model, optimizer = engine.setup(Net(dropout), make_optimizer)
        schedule = engine.register("schedule", make_schedule(optimizer))
        average = engine.register("average", Average())
        loader = DataLoader(rows or make_rows(44), batch_size=batch_size, shuffle=shuffle, num_workers=num_workers)
        batches = engine.shard(loader)
        losses: list[float] = []
        step = start = engine.load("auto")
        micro = 0
        while step < num_steps:
            for batch in batches:
                micro += 1
                is_last = micro % NUM_MICRO == 0
                with engine.accumulate(is_last):
                    with engine.autocast():
                        loss = model(**batch)[0]
                    engine.backward(loss / NUM_MICRO)
                losses.append(loss.item())
                average.total, average.count = average.total + loss.detach(), average.count + 1
                if not is_last:
                    continue
                engine.clip()
                if engine.step():
                    schedule.step()
                step += 1
                if step == save_at:
                    engine.save(step)
                if step == num_steps:
                    break
        weights = engine.strategy.model_state(model)
        return {
            "start": start,
            "weights": {name: value.tolist() for name, value in weights.items()},
            "losses": losses,
            "rate": optimizer.param_groups[0]["lr"],
            "mean": float(average.total) / average.count,
            "epoch": batches.epoch,
        }


def train_by_hand(*, world_size: int = 1, num_steps: int = NUM_STEPS, rows: Rows | None = None) -> dict[str, Any]:
    """Do the same in torch, with the batches of all ranks one after the other; in the data's order."""
    torch.manual_seed(3)
    model = Net()
    optimizer = make_optimizer(model)
    schedule = make_schedule(optimizer)
    batches = list(DataLoader(rows or make_rows(44), batch_size=4))
    batches += batches[: -len(batches) % world_size]
    position = 0
    for _ in range(num_steps):
        for _ in range(NUM_MICRO * world_size):
            model(**batches[position % len(batches)])[0].div(NUM_MICRO * world_size).backward()
            position += 1
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {name: value.tolist() for name, value in model.state_dict().items()}


def assert_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(theirs[name]), atol=1e-6, rtol=0)


def run_twice(strategy: str, precision: str) -> dict[str, Any]:
    """Train in the data's order; then with dropout, whole and stopped."""

    def make() -> Any:
        return create_strategy(strategy, use_cpu=True)

    options: dict[str, Any] = {"precision": precision, "dropout": 0.2}
    return {
        "plain": train(Path("plain"), strategy=make(), shuffle=False),
        "whole": train(Path("whole"), strategy=make(), **options),
        "cut": train(Path("cut"), strategy=make(), **options, num_steps=4, save_at=4),
        "resumed": train(Path("cut"), strategy=make(), **options),
    }


def check_that_it_equals_one_process_and_resumes(
    run_distributed: Callable[..., list[Any]], strategy: str, precision: str = "fp32"
) -> None:
    answers = run_distributed(run_twice, strategy=strategy, precision=precision)
    assert_close(answers[0]["plain"]["weights"], train_by_hand(world_size=2))
    for answer in answers:
        whole, resumed = answer["whole"], answer["resumed"]
        assert resumed["start"] == 4
        assert resumed["losses"] == whole["losses"][8:]
        assert all(resumed[name] == whole[name] for name in ("weights", "rate", "mean", "epoch"))
