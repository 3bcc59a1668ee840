"""Logs, evaluations and saves come at the steps, and in the order, of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.16")  # older ones evaluate only when it is due

from support.hub_models import run_options  # noqa: E402

import hftrain  # noqa: E402

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("environment_stays")]

ROWS = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 10  # five steps an epoch


class Mean(torch.nn.Module):
    """A model whose checkpoint is small."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


class Calls(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.done: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        kind = next((name for name in ("eval_loss", "train_loss") if name in logs), "loss")
        self.done.append((f"log {kind}", state.global_step, state.epoch))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.done.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.done.append(("save", state.global_step))


def calls(module: Any, folder: Path, options: dict[str, Any]) -> list[Any]:
    settings = run_options(per_device_train_batch_size=2, per_device_eval_batch_size=10, **options)
    arguments, recorder = module.TrainingArguments(str(folder), **settings), Calls()
    module.Trainer(Mean(), arguments, train_dataset=ROWS, eval_dataset=ROWS, callbacks=[recorder]).train()
    return recorder.done


ENDS: list[dict[str, Any]] = [
    {"max_steps": 7}, {"max_steps": 10}, {"num_train_epochs": 2}, {"num_train_epochs": 1.4},
    {"max_steps": 5, "gradient_accumulation_steps": 2},
]  # fmt: skip
EVALUATIONS: list[dict[str, Any]] = [
    {"eval_strategy": "no"}, {"eval_strategy": "epoch"}, {"eval_strategy": "epoch", "eval_delay": 1.5},
    *({"eval_strategy": "steps", "eval_steps": steps} for steps in (1, 3, 5, 100, 0.3)),
    {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 4}, {"eval_strategy": "steps", "eval_delay": 100},
    {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True},
]  # fmt: skip
SAVES: list[dict[str, Any]] = [
    {"save_strategy": "no"}, {"save_strategy": "epoch"}, {"save_strategy": "steps", "save_steps": 4},
    {"save_strategy": "steps", "save_steps": 0.5},
]  # fmt: skip
LOGS: list[dict[str, Any]] = [
    {"logging_strategy": "no"}, {"logging_strategy": "epoch"}, {"logging_steps": 4},
    {"logging_steps": 3, "logging_first_step": True},
]  # fmt: skip


@pytest.mark.parametrize("end", ENDS, ids=str)
def test_actions_come_when_they_come_in_transformers(tmp_path: Path, end: dict[str, Any]) -> None:
    # Each way to evaluate meets each way to save and to log at some end.
    shift = ENDS.index(end)
    for number, evaluation in enumerate(EVALUATIONS):
        options = {**end, **evaluation, **SAVES[(number + shift) % 4], **LOGS[(number // 2 + shift) % 4]}
        ours, theirs = (
            calls(module, tmp_path / f"{module.__name__}{number}", options) for module in (hftrain, transformers)
        )
        assert ours == theirs, options
