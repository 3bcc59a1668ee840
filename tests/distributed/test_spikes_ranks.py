"""SpikeGuard on two processes: a spike in the data of one is skipped by both, or takes both back."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import Stop
from support.tiny import Net, make_arguments, make_rows

from hftrain import SpikeGuard, Trainer, set_seed

pytestmark = pytest.mark.distributed


class Sensitive(Net):
    """Its loss grows with the largest input."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        loss, *rest = super().forward(x, labels)
        return (loss * x.abs().max().clamp(min=10.0), *rest)


def train(folder: Path, strategy: str, at: int | None, *, resumes: bool, on_spike: str) -> list[Any]:
    set_seed(3)
    rows = make_rows(48)
    rows[32] = {**rows[32], "x": torch.full((4,), 1e4)}  # of the first process, in its ninth batch
    args = make_arguments(
        folder, max_steps=12, learning_rate=0.01, per_device_train_batch_size=2, max_grad_norm=0.0,
        train_sampling_strategy="sequential", save_strategy="steps", save_steps=6,
    )  # fmt: skip
    guard = SpikeGuard(on_spike, rolling_interval_length=8, sigma_factor=20)
    trainer = Trainer(Sensitive(), args, train_dataset=rows, callbacks=[guard, Stop(at)], strategy=strategy)
    trainer.train(resume_from_checkpoint=resumes)
    weights = [value.flatten().tolist() for value in trainer.strategy.model_state(trainer.model_wrapped).values()]
    spikes = [entry["step"] for entry in trainer.state.log_history if "spike_loss" in entry]
    trainer.strategy.close()
    return [spikes, weights]


def train_each(folder: str) -> dict[str, Any]:
    found = {}
    for case in product(("ddp", "fsdp"), ("skip", "rewind")):
        name, on_spike = case
        for at in (8, 9, None):
            parts = train(Path(folder, *case, "parts"), name, at, resumes=at != 8, on_spike=on_spike)
        whole = train(Path(folder, *case, "whole"), name, None, resumes=False, on_spike=on_spike)
        found["-".join(case)] = [whole, parts]
    return found


def test_all_ranks_skip_or_go_back_together_and_continue_exactly_twice(tmp_path: Path, run_distributed: Any) -> None:
    results = run_distributed(train_each, folder=str(tmp_path))
    for found in results:
        for whole, parts in found.values():
            assert whole[0] == [9]
            assert parts == whole
        assert found["ddp-skip"][0][1] != found["ddp-rewind"][0][1]
    assert results[0]["ddp-rewind"] == results[1]["ddp-rewind"]
