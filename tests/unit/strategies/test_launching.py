"""What `hftrain.launch` refuses before it starts anything; real processes: tests/distributed/test_launching.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import ConfigError, Trainer, launch
from hftrain.strategies.ddp import DDPStrategy
from hftrain.strategies.fsdp.strategy import FSDPStrategy
from hftrain.strategies.single import SingleDeviceStrategy


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_launch_wants_a_number_of_processes(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="number of processes"):
        launch(max, 1, 2, num_processes=wrong)


def test_launch_within_a_launch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one of 2 already"):
        launch(max, 1, 2, num_processes=2)


def test_fork_after_a_gpu_was_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in: there may be no GPU here.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="has used a GPU"):
        launch(max, 1, 2, num_processes=2, start_method="fork")


def test_fork_within_a_process_group_is_refused() -> None:
    strategy = DDPStrategy(use_cpu=True)
    strategy.launch()
    try:
        with pytest.raises(ConfigError, match=r"each would train alone.*Close what made it first"):
            launch(max, 1, 2, num_processes=2, start_method="fork")
    finally:
        strategy.close()


def test_one_process_is_this_one() -> None:
    assert launch(max, 1, 2, num_processes=1, key=lambda number: -number) == [1]


@pytest.mark.parametrize("kind", [DDPStrategy, FSDPStrategy, SingleDeviceStrategy])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_strategy_or_trainer_of_another_process_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, rank: str
) -> None:
    strategy, rows = kind(use_cpu=True), make_rows(8)
    trainer = Trainer(Net(), make_arguments(tmp_path), train_dataset=rows, strategy=kind(use_cpu=True))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(ConfigError, match=rf"Cannot use this {kind.__name__} as rank {rank} of 2.*as rank 0 of 1"):
        Trainer(Net(), make_arguments(tmp_path), train_dataset=rows, strategy=strategy)
    with pytest.raises(ConfigError, match="inside the function that launch"):
        trainer.train()
