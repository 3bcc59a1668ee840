"""The estimate of memory where processes exchange gradients or share layers, against what the profiler sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory import StepMemory
from support.tiny import make_arguments
from torch import nn
from torch.distributed.tensor import DTensor

from hftrain import Trainer
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.distributed

WIDTH = 512


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Gradients of several buckets, which DDP makes anew once it has seen in which order they come.
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (nn.functional.cross_entropy(self.layers(x), labels),)


PLAN = {"layers.0": "colwise", "layers.2": "rowwise"}


def estimate(folder: str, name: str) -> list[int]:
    torch.manual_seed(0)
    rows = [{"x": torch.randn(WIDTH), "labels": torch.tensor(index % 3)} for index in range(64)]
    measure, trainers = StepMemory(), []
    for callbacks in ([], [measure]):
        args = make_arguments(Path(folder), max_steps=4)
        strategy: Any = create_strategy("tp", use_cpu=True, plan=PLAN) if name == "tp" else name
        trainers.append(Trainer(Wide(), args, train_dataset=rows, callbacks=callbacks, strategy=strategy))
    found = trainers[0].estimate_memory().peak_bytes
    trainers[1].train()
    own = [each.to_local() if isinstance(each, DTensor) else each for each in trainers[1].model.parameters()]
    # There before a step: the parameters, AdamW's two numbers for each, and with DDP the buckets of gradients.
    copies = 4 if name == "ddp" else 3
    return [found, copies * sum(each.nbytes for each in own) + measure.peaks[-1]]


@pytest.mark.parametrize("name", ["ddp", "tp"])
def test_estimate_is_within_ten_percent_of_the_measured_peak(tmp_path: Path, run_distributed: Any, name: str) -> None:
    for found, measured in run_distributed(estimate, folder=str(tmp_path), name=name):
        assert found == pytest.approx(measured, rel=0.1)
