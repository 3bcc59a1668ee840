"""Throughput on two processes: sums over both, the same in both."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny import Net, make_arguments, make_rows

from hftrain import Throughput, Trainer

pytestmark = pytest.mark.distributed


def train(folder: str) -> list[dict[str, float]]:
    args = make_arguments(f"{folder}/out", max_steps=4, per_device_train_batch_size=2, logging_steps=2)
    trainer = Trainer(Net(), args, train_dataset=make_rows(32), callbacks=[Throughput(peak_flops=1e10)], strategy="ddp")
    trainer.train()
    trainer.strategy.close()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_all_ranks_log_the_same_sums(tmp_path: Any, run_distributed: Any) -> None:
    first, second = run_distributed(train, folder=str(tmp_path))
    names = ("samples_per_second", "flops_per_second", "mfu")
    for entry, other in zip(first, second, strict=True):
        assert [entry[name] for name in names] == [other[name] for name in names]
        # 2 * (4 * 8 + 8 * 3) per sample forward; backward twice that, but for the inputs of the first layer.
        assert entry["flops_per_second"] == pytest.approx((3 * 2 * 56 - 2 * 32) * entry["samples_per_second"])
        assert entry["mfu"] == pytest.approx(entry["flops_per_second"] / 2e10)
