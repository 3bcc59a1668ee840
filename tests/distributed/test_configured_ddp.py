"""A training from a file on two processes: one configuration is written, and each process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import Task, make_data

from hftrain.cli import fit

pytest.importorskip("jsonargparse")
pytestmark = pytest.mark.distributed
OPTIONS = ("--task.dropout=0.2", "--args.max_steps=6", "--args.save_steps=2", "--args.report_to=none")


def train(options: list[str]) -> Any:
    """Train as `hftrain fit` does, and return what this process knows at the end."""
    trainer = fit(Task, make_data, argv=[*options, "--args.use_cpu=true", "--args.disable_tqdm=true"])
    weights = [value.flatten()[:2].tolist() for value in trainer.model.state_dict().values()]
    return {"world_size": trainer.strategy.world_size, "weights": weights}


def test_two_processes_train_from_one_configuration_resumed_twice(tmp_path: Path, run_distributed: Any) -> None:
    run = str(tmp_path / "run")
    whole = run_distributed(train, options=[*OPTIONS, f"--args.output_dir={run}"])
    assert [each["world_size"] for each in whole] == [2, 2]
    assert "dropout: 0.2" in Path(run, "config.yaml").read_text()
    assert run_distributed(train, options=["--from", run, f"--args.output_dir={run}2"]) == whole
    for step in (2, 4):
        resume = f"--args.resume_from_checkpoint={run}/checkpoint-{step}"
        assert run_distributed(train, options=["--from", run, resume]) == whole
