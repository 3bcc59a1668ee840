"""Strategies that split or exchange, on one device alone: they train like `single`, and go on after a stop.

On a GPU (marked `cuda`) with its real backends; the same on the CPU shows that the test itself holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import launch
from support.resuming import StopAt
from support.tiny import make_arguments, make_rows
from torch import nn

from hftrain import Trainer, set_seed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
# By precision: how far the losses may be from those of `single`, whose operations are cast one by one.
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2, "tf32": 1e-2}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh())
        self.scale = nn.Parameter(torch.ones(16), requires_grad=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.head(self.second(self.first(x) * self.scale)).float()
        return nn.functional.cross_entropy(logits, labels), logits


def make_trainer(folder: str, device: str, strategy: str, precision: str, *callbacks: Any) -> Trainer:
    set_seed(3)
    args = make_arguments(
        Path(folder), use_cpu=device == "cpu", gradient_accumulation_steps=2, max_grad_norm=0.5, optim="adamw_torch",
        eval_strategy="epoch", save_strategy="steps", save_steps=100,
    )  # fmt: skip
    data = {"train_dataset": make_rows(30), "eval_dataset": make_rows(7, seed=2)}
    return Trainer(Net(), args, **data, callbacks=list(callbacks), strategy=strategy, precision=precision)


def losses(trainer: Trainer) -> list[float]:
    history = trainer.state.log_history
    return [line[name] for line in history for name in ("loss", "eval_loss") if name in line]


def train(folder: str, device: str, strategies: list[str], precisions: list[str]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for precision in precisions:
        for strategy in strategies:
            where = f"{folder}/{precision}/{strategy}"
            whole = make_trainer(f"{where}/whole", device, strategy, precision)
            whole.train()
            make_trainer(f"{where}/parts", device, strategy, precision, StopAt(3)).train()
            resumed = make_trainer(f"{where}/parts", device, strategy, precision)
            resumed.train(resume_from_checkpoint=True)
            found = {"device": whole.strategy.device.type, "whole": losses(whole), "resumed": losses(resumed)}
            answers[f"{strategy} {precision}"] = found
    return answers


def check(folder: Path, device: str, strategies: list[str], precisions: list[str]) -> None:
    kwargs = {"folder": str(folder), "device": device, "precisions": precisions}
    ended = launch(train, folder, num_processes=1, kwargs={**kwargs, "strategies": ["single", *strategies]})
    assert ended.returncode == 0, ended.output[-20_000:]
    (answers,) = ended.results
    assert len(answers) == (1 + len(strategies)) * len(precisions)
    for name, found in answers.items():
        precision = name.split()[-1]
        expected = answers[f"single {precision}"]
        assert found["device"] == device, name
        assert found["resumed"] == found["whole"], name
        assert found["whole"] == pytest.approx(expected["whole"], rel=TOLERANCE[precision]), name
        assert len(found["whole"]) == 2 * 4 + 2, name


@pytest.mark.distributed
@pytest.mark.parametrize("device", DEVICES)
def test_ddp_and_fsdp_train_like_single(tmp_path: Path, device: str) -> None:
    precisions = ["fp32", "bf16", "fp16"] + (["tf32"] if device == "cuda" else [])
    check(tmp_path, device, ["ddp", "fsdp"], precisions)


@pytest.mark.deepspeed
@pytest.mark.parametrize("device", DEVICES)
def test_deepspeed_trains_like_single(tmp_path: Path, device: str) -> None:
    check(tmp_path, device, ["deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"], ["fp32", "bf16"])
