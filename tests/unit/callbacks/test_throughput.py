"""Samples, tokens, operations and utilisation in the logs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import make_arguments
from torch import nn

from hftrain import Throughput, Trainer, TrainerCallback
from hftrain.extras.profiling.throughput import known_peak


class Words(nn.Module):
    def __init__(self, count: int | None = None) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)
        if count is not None:
            self.floating_point_ops = lambda batch: count  # type: ignore[assignment]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.table(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


# 2 * 4 * 10 for each of 2 * 5 tokens forward, and twice that backward: for the weights and for the inputs.
FLOPS = 3 * 2 * 4 * 10 * 2 * 5


def rows(num: int = 24) -> list[dict[str, Any]]:
    return [{"input_ids": [i % 10] * 5, "labels": [i % 10] * 5} for i in range(num)]


class Clock(TrainerCallback):
    """Makes every step and evaluation take a while."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.05)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.5)


def logs(folder: Path, guest: Throughput, model: nn.Module, **options: Any) -> list[dict[str, float]]:
    settings = {"max_steps": 6, "per_device_train_batch_size": 2, "logging_steps": 2, **options}
    args = make_arguments(folder, **settings)
    trainer = Trainer(model, args, train_dataset=rows(), eval_dataset=rows(2), callbacks=[guest, Clock])
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_speed_is_that_of_what_was_done_without_evaluations(tmp_path: Path) -> None:
    found = logs(tmp_path, Throughput(peak_flops=1e9), Words(), eval_strategy="steps", eval_steps=1)
    for entry in found:
        assert entry["tokens_per_second"] == pytest.approx(5 * entry["samples_per_second"])
        assert entry["flops_per_second"] == pytest.approx(FLOPS / 2 * entry["samples_per_second"])
        assert entry["mfu"] == pytest.approx(entry["flops_per_second"] / 1e9)
    # Two steps of 2 samples and 0.05 s; with the two evaluations it would be below 4 a second.
    assert 4 < found[-1]["samples_per_second"] < 40


def test_models_own_count_comes_first(tmp_path: Path) -> None:
    found = logs(tmp_path, Throughput(), Words(count=1000))
    assert found[0]["flops_per_second"] == pytest.approx(500 * found[0]["samples_per_second"])
    assert "mfu" not in found[0]  # nothing is known of a CPU


def test_utilisation_is_never_above_one(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Correct it"):
        found = logs(tmp_path, Throughput(peak_flops=1.0), Words())
    assert all("mfu" not in entry for entry in found)


def test_micro_batches_of_every_shape_are_counted(tmp_path: Path) -> None:
    found = logs(tmp_path, Throughput(), Words(), gradient_accumulation_steps=2, logging_steps=3)
    assert found[-1]["flops_per_second"] == pytest.approx(FLOPS / 2 * found[-1]["samples_per_second"])


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Tesla T4", 65e12), ("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12), ("NVIDIA T400", None),
    ],
)  # fmt: skip
def test_devices_are_known_by_name(name: str, peak: float | None) -> None:
    assert known_peak(name) == peak
