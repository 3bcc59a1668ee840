"""A manager for one process, and checkpoints with every documented file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hftrain.checkpoint import state_files
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.weights import save_task_state, save_weights
from hftrain.core.seed import capture_rng
from hftrain.core.state import TrainerState
from hftrain.storage.tensors import save_containers
from hftrain.strategies import SingleDeviceStrategy


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    """The output folder of the managers that `make_manager` makes; absent at first."""
    return tmp_path / "out"


@pytest.fixture
def make_manager(output_dir: Path) -> Callable[..., CheckpointManager]:
    """Return a function that makes a manager; keyword arguments go to its config."""

    def make(**config: object) -> CheckpointManager:
        return CheckpointManager(output_dir, group=SingleDeviceStrategy(use_cpu=True), **config)

    return make


@pytest.fixture
def save_at() -> Callable[[CheckpointManager, int], Path]:
    """Return a function that saves a checkpoint with every kind of file at a step."""

    def save(manager: CheckpointManager, step: int) -> Path:
        model = torch.nn.Linear(3, 2)
        optimizer = {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        writers = [
            lambda folder: save_weights(model, folder),
            lambda folder: save_task_state({"scale": torch.ones(1)}, folder),
            lambda folder: save_containers(optimizer, folder / "optimizer.pt"),
            lambda folder: save_containers({"last_epoch": step}, folder / "scheduler.pt"),
            lambda folder: save_containers({"scale": 2.0}, folder / "scaler.pt"),
            lambda folder: state_files.save_trainer_state(TrainerState(global_step=step), folder),
            lambda folder: save_containers({"learning_rate": 0.1}, folder / "training_args.bin"),
            lambda folder: save_containers(capture_rng(), folder / "rng_state.pth"),
        ]
        facts = {"progress": {"step": step}, "geometry": {"world_size": 1, "batch_size": 8}}
        return manager.save(step, writers, facts=facts)

    return save
