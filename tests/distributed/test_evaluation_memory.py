"""What a process holds of its own while predictions are spilled does not grow with the number of processes."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.memory import Peak
from support.tiny import make_arguments
from torch import nn
from torch.utils.data import Dataset

from hftrain import Trainer

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status"),
]

NUM_SAMPLES, NUM_CLASSES = 6000, 2500
NUM_BYTES = NUM_SAMPLES * NUM_CLASSES * 4


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Samples that take no memory."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)]), "labels": torch.tensor(index % 3)}


class Wide(nn.Module):
    """Many logits for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, NUM_CLASSES)[None])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = (x * self.weight).sin()
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def predict(root: str) -> Any:
    folder = Path(root) / "spilled"
    trainer = Trainer(Wide(), make_arguments(Path(root), per_device_eval_batch_size=100), spill_dir=folder)
    trainer.predict(Numbers(400))
    with Peak(daemon=True) as peak:
        found = trainer.predict(Numbers(NUM_SAMPLES)).predictions
    assert isinstance(found, numpy.memmap)
    assert list(folder.iterdir()) == []
    return [peak.most - peak.first, hashlib.sha256(found).hexdigest()]


def test_own_memory_does_not_grow_with_processes(tmp_path: Path, run_distributed: Any) -> None:
    answers = {number: run_distributed(predict, root=str(tmp_path), num_processes=number) for number in (1, 2, 4)}
    # One and the same array everywhere, and half of it in nobody's own memory: a copy would be all of it.
    assert len({digest for each in answers.values() for _, digest in each}) == 1
    for number, each in answers.items():
        for grown, _ in each:
            assert grown < NUM_BYTES / 2, (number, grown, NUM_BYTES)
