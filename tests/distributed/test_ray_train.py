"""A real Ray: a run inside `TorchTrainer`, and `hftrain.launch` in a worker of Ray."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.distributed import run_command

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SCRIPT = """
import json
import os
import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    from pathlib import Path

    from support.tiny import Net, make_arguments, make_rows

    from hftrain import Trainer

    args = make_arguments(Path(config["folder"], "run"), max_steps=3, save_strategy="steps", save_steps=3)
    trainer = Trainer(Net(), args, train_dataset=make_rows(16))
    trainer.train(resume_from_checkpoint="auto")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    told = [trainer.strategy.name, trainer.strategy.rank, trainer.strategy.world_size, losses]
    Path(config["folder"], f"result_{trainer.strategy.rank}.json").write_text(json.dumps(told))


def work(number):
    return number + int(os.environ["RANK"])


@ray.remote
def group():
    from hftrain import launch

    return launch(work, 10, num_processes=2)


folder = sys.argv[1]
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
assert ray.get(group.remote(), timeout=200) == [10, 11]
parts = {"scaling_config": ScalingConfig(num_workers=2), "run_config": RunConfig(storage_path=folder)}
TorchTrainer(train, train_loop_config={"folder": folder}, **parts).fit()
"""


def test_workers_train_one_run_and_may_launch_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {"PYTHONPATH": os.pathsep.join(paths), "RAY_USAGE_STATS_ENABLED": "0"}
    status, output = run_command([sys.executable, str(script), str(tmp_path)], tmp_path, env, timeout_s=550)
    assert status == 0, output
    first, second = (json.loads((tmp_path / f"result_{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    assert (first[:3], second[:3]) == (["ddp", 0, 2], ["ddp", 1, 2])
    assert first[3] == second[3]
    assert len(first[3]) == 3
    assert [each.name for each in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
