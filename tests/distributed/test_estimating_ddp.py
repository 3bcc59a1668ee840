"""The estimate of memory where processes exchange gradients, against what torch's profiler sees allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory import StepMemory
from support.tiny import make_arguments
from torch import nn

from hftrain import Trainer

pytestmark = pytest.mark.distributed

WIDTH = 512


class Wide(nn.Module):
    """Most of its memory is parameters."""

    def __init__(self) -> None:
        super().__init__()
        # Gradients of several buckets, which DDP makes anew once it has seen in which order they come.
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (nn.functional.cross_entropy(self.layers(x), labels),)


def estimate(folder: str) -> list[int]:
    torch.manual_seed(0)
    rows = [{"x": torch.randn(WIDTH), "labels": torch.tensor(index % 3)} for index in range(64)]
    measure, trainers = StepMemory(), []
    for callbacks in ([], [measure]):
        args = make_arguments(Path(folder), max_steps=4)
        trainers.append(Trainer(Wide(), args, train_dataset=rows, callbacks=callbacks, strategy="ddp"))
    found = trainers[0].estimate_memory().peak_bytes
    trainers[1].train()
    parameters = 4 * sum(parameter.numel() for parameter in trainers[1].model.parameters())
    # There before a step: the parameters, AdamW's two numbers for each, and the buckets of gradients.
    return [found, 4 * parameters + measure.peaks[-1]]


def test_estimate_with_ddp_is_within_ten_percent_of_the_measured_peak(tmp_path: Path, run_distributed: Any) -> None:
    for found, measured in run_distributed(estimate, folder=str(tmp_path)):
        assert found == pytest.approx(measured, rel=0.1)
