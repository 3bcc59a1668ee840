"""Real `mpirun`s: Open MPI's and MPICH's start the processes, which then meet through torch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support.distributed import run_command
from support.tiny import Net, make_arguments, make_rows

from hftrain import Trainer

pytestmark = pytest.mark.mpi

_WORKER = Path(__file__).parents[1] / "support/worker.py"
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# More processes than Open MPI sees cores are refused otherwise.
STARTERS = {
    "Open MPI": (("mpirun.openmpi", "--oversubscribe", "-n"), "openmpi-bin"),
    "MPICH": (("mpiexec.hydra", "-n"), "mpich"),
}


def train(folder: str) -> list[Any]:
    """Train with nothing said of processes, after the arguments were asked for them."""
    args = make_arguments(Path(folder), max_steps=3, save_strategy="steps", save_steps=3)
    before = [args.world_size, args.process_index, args.local_process_index]
    trainer = Trainer(Net(), args, train_dataset=make_rows(16))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [before, trainer.strategy.name, trainer.strategy.rank, losses]


def in_turn(folder: str) -> list[bool]:
    """Let rank 0 go first before any Trainer exists: accelerate meets the others then."""
    args, done = make_arguments(Path(folder), ddp_timeout=60), Path(folder, "done")
    with args.main_process_first():
        found = done.exists()
        done.touch()
    trainer = Trainer(Net(), args, train_dataset=make_rows(16))
    trainer.train()
    return [found, trainer.strategy.world_size == 2]


def start(launcher: str, name: str, folder: Path, *, num_processes: int = 2) -> list[Any]:
    """Call a function of this file under a launcher, and return the answers by rank."""
    command, package = STARTERS[launcher]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed; on Debian: apt-get install {package}")
    (folder / "kwargs.json").write_text(json.dumps({"folder": str(folder)}), encoding="utf-8")
    worker = [sys.executable, str(_WORKER), __file__, name]
    status, output = run_command([*command, str(num_processes), *worker], folder, _AS_ROOT)
    assert status == 0, output
    return [json.loads((folder / f"result_{rank}.json").read_text(encoding="utf-8")) for rank in range(num_processes)]


@pytest.mark.parametrize("launcher", STARTERS)
def test_processes_train_one_run(launcher: str, tmp_path: Path) -> None:
    first, second = start(launcher, "train", tmp_path)
    assert first[:3] == [[2, 0, 0], "ddp", 0]
    assert second[:3] == [[2, 1, 1], "ddp", 1]
    assert first[3] == second[3]
    assert len(first[3]) == 3
    assert [each.name for each in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_one_process_is_alone(tmp_path: Path) -> None:
    assert start("Open MPI", "train", tmp_path, num_processes=1)[0][:3] == [[1, 0, 0], "single", 0]


def test_processes_go_in_turn_before_a_run(tmp_path: Path) -> None:
    assert start("Open MPI", "in_turn", tmp_path) == [[False, True], [True, True]]
