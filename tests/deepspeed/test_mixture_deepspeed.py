"""A mixture under DeepSpeed: two ranks split the draws of one process, and continue them after two stops."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from resume.test_mixture import train

pytestmark = pytest.mark.deepspeed


def train_each(folder: str) -> list[Any]:
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed's use of torch
    found = []
    for stage, workers in ((1, 2), (3, 0)):
        options: dict[str, Any] = {
            "kind": "changed",
            "epoch_size": 28,
            "num_train_epochs": 2,
            "per_device_train_batch_size": 2,
            "dataloader_num_workers": workers,
            "deepspeed": {"zero_optimization": {"stage": stage}},
        }
        seen = []
        # A pass has 7 updates.
        for name, stop in (("whole", None), ("parts", 7), ("parts", 9), ("parts", None)):
            trainer, part = train(
                Path(folder, str(stage), name), stop=stop, resume=name == "parts" and stop != 7, **options
            )
            seen.append(list(map(list, part)))
            trainer.strategy.close()
        found.append([seen[0], [sample for part in seen[1:] for sample in part]])
    return found


def test_ranks_split_the_draws_of_one_and_continue_exactly(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(train_each, 2, folder=str(tmp_path))
    for (whole, parts), (other, other_parts), workers in zip(first, second, (2, 0), strict=True):
        assert parts == whole
        assert other_parts == other
        options = {"kind": "changed", "epoch_size": 28, "num_train_epochs": 2, "dataloader_num_workers": workers}
        alone = train(tmp_path / f"alone{workers}", **options)[1]
        merged = [pair for at in range(0, 28, 2) for pair in whole[at : at + 2] + other[at : at + 2]]
        assert merged == list(map(list, alone))
