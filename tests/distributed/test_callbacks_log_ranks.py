"""Callbacks that log on two processes: the main process reports, and both have the same history."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import Trainer, TrainerCallback
from hftrain.loggers import Logger

pytestmark = pytest.mark.distributed


class Shows(Logger):
    name = "shows"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, metrics: Any, step: int) -> None:
        self.calls += [("log", metrics[name], step) for name in metrics if name == "train/mine"]

    def log_image(self, name: str, image: Any, step: int) -> None:
        self.calls.append((name, list(image.shape), step))


class Looks(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, logger: Any, **kwargs: Any) -> None:
        logger.log({"mine": float(state.global_step)})
        if state.is_world_process_zero:  # as users write it; nothing waits for the other process
            logger.log_image("picture", torch.zeros(3, 2, 2))


def train(folder: str) -> list[Any]:
    args = make_arguments(f"{folder}/out", max_steps=2, logging_strategy="no")
    tracker = Shows()
    data = {"train_dataset": make_rows(16), "callbacks": [Looks], "loggers": [tracker]}
    trainer = Trainer(Net(), args, strategy="ddp", **data)
    trainer.train()
    trainer.strategy.close()
    return [tracker.calls, [entry["mine"] for entry in trainer.state.log_history if "mine" in entry]]


def test_main_process_reports(tmp_path: Any, run_distributed: Any) -> None:
    (calls, history), (others, other_history) = run_distributed(train, folder=str(tmp_path))
    assert calls == [[kind, what, step] for step in (1, 2) for kind, what in (("log", step), ("picture", [2, 2, 3]))]
    assert others == []
    assert history == other_history == [1.0, 2.0]
