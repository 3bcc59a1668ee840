"""A real SLURM: which processes are one run, which are alone, and how a run ends and comes back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.slurm import Slurm, cluster, missing, wait_for
from support.tiny import Net, at, make_arguments, make_rows

from hftrain import Trainer, TrainerCallback, set_seed

pytestmark = pytest.mark.slurm

_WORKER = Path(__file__).parents[1] / "support/worker.py"
# What a process takes itself for, without torch and its seconds of import.
ASK = f"{sys.executable} -c 'from hftrain.core.launcher import read_launch; print(read_launch())'"
ALONE = "Launch(launcher=None, rank=0, world_size=1, local_rank=None, local_world_size=None)"


def task_of_slurm(rank: int, world_size: int) -> str:
    return (
        f"Launch(launcher='SLURM', rank={rank}, world_size={world_size}, "
        f"local_rank={rank}, local_world_size={world_size})"
    )


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if absent := missing():
        pytest.skip(f"SLURM lacks {', '.join(absent)}; on Debian: apt-get install slurm-wlm munge")
    with cluster() as running:
        yield running


def worker(name: str, folder: Path, /, **kwargs: Any) -> str:
    """Return the command that calls a function of this file, whose answers are in ``result_RANK.json``."""
    (folder / "kwargs.json").write_text(json.dumps(kwargs), encoding="utf-8")
    return f"{sys.executable} {_WORKER} {__file__} {name}"


def result(folder: Path, rank: int = 0) -> Any:
    return json.loads((folder / f"result_{rank}.json").read_text(encoding="utf-8"))


class Hold(TrainerCallback):
    """Say that the run is on its way, and wait at a step until a file lets it go."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.at = folder, at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            (self.folder / "running").touch()
            wait_for((self.folder / "go").exists, "the file go", timeout_s=120)


def train(folder: str, *, max_steps: int = 20, holds_at: int = -1) -> dict[str, Any]:
    """Train the tiny network, from its newest checkpoint if there is one."""
    args = make_arguments(Path(folder, "runs"), max_steps=max_steps, save_strategy="steps", save_steps=2)
    begun = []
    begin = at("on_train_begin", lambda args, state, control, **kwargs: begun.append(state.global_step))
    callbacks = [begin, Hold(Path(folder), holds_at)]
    set_seed(1)  # the first weights
    trainer = Trainer(Net(), args, train_dataset=make_rows(64), callbacks=callbacks)
    trainer.train(resume_from_checkpoint="auto")
    weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
    return {
        "strategy": trainer.strategy.name,
        "world_size": trainer.strategy.world_size,
        "begun": begun,
        "weights": weights.double().sum().item(),
        "saved": sorted(each.name for each in Path(folder, "runs").glob("checkpoint-*")),
    }


def test_tasks_of_a_step_train_one_run(slurm: Slurm, tmp_path: Path) -> None:
    slurm.run("srun", "--ntasks=2", *worker("train", tmp_path, folder=str(tmp_path)).split(), folder=tmp_path)
    first, second = result(tmp_path, 0), result(tmp_path, 1)
    assert first == second
    assert (first["strategy"], first["world_size"], first["begun"]) == ("ddp", 2, [0])


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_tasks_know_their_places(slurm: Slurm, tmp_path: Path, mpi: str) -> None:
    told = slurm.run("srun", "--ntasks=3", f"--mpi={mpi}", "bash", "-c", ASK, folder=tmp_path)
    assert sorted(told.splitlines()) == [task_of_slurm(rank, 3) for rank in range(3)]


def test_processes_that_srun_did_not_start_are_alone(slurm: Slurm, tmp_path: Path) -> None:
    """A batch script's own, a shell's in an allocation, a shell's in a step, and those of a job that a task submits."""
    resubmit = f'[ $SLURM_PROCID = 0 ] || sbatch --wait --ntasks=2 --output=inner --wrap="{ASK}"'
    (tmp_path / "task.sh").write_text(resubmit, encoding="utf-8")
    slurm.run("sbatch", "--wait", "--ntasks=2", "--output=batch", f"--wrap={ASK}", folder=tmp_path)
    slurm.run("srun", "--ntasks=2", "bash", "task.sh", folder=tmp_path)
    assert (tmp_path / "batch").read_text() == (tmp_path / "inner").read_text() == f"{ALONE}\n"
    assert ALONE in slurm.run("salloc", "--ntasks=2", "bash", "-c", ASK, folder=tmp_path)
    assert ALONE in slurm.run("srun", "--ntasks=1", "bash", "-c", ASK, folder=tmp_path)


def test_shell_with_several_tasks_is_alone_and_its_own_steps_are_not(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "ask.sh").write_text(ASK, encoding="utf-8")
    (tmp_path / "shell.sh").write_text("bash ask.sh\nsrun --overlap --ntasks=2 bash ask.sh\n", encoding="utf-8")
    pty = "srun --ntasks=2 --pty bash -i shell.sh"
    told = slurm.run("script", "--quiet", "--return", "--command", pty, "/dev/null", folder=tmp_path)
    said = [line.strip() for line in told.splitlines() if "Launch" in line]
    assert said[0].endswith(ALONE)
    assert sorted(said[1:]) == [task_of_slurm(rank, 2) for rank in range(2)]


def test_tasks_of_a_step_with_a_terminal_are_one_run(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "task.sh").write_text(f"{ASK} > told-$SLURM_PROCID 2>&1\n", encoding="utf-8")
    pty = "srun --ntasks=2 --pty bash task.sh"
    slurm.run("script", "--quiet", "--return", "--command", pty, "/dev/null", folder=tmp_path)
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    assert told == [task_of_slurm(rank, 2) + "\n" for rank in range(2)]


def test_torchrun_wins(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text("from hftrain.core.launcher import read_launch\nprint(read_launch())\n", "utf-8")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "ask.py")
    told = slurm.run("srun", "--ntasks=1", *torchrun, folder=tmp_path)
    assert [line.count("launcher='torchrun'") for line in told.splitlines() if "Launch" in line] == [1, 1]


def test_jobs_of_an_array_meet_at_ports_of_their_own(slurm: Slurm, tmp_path: Path) -> None:
    for index in (0, 1):
        (tmp_path / str(index)).mkdir()
        worker("train", tmp_path / str(index), folder=".", holds_at=1)
    script = f"cd $SLURM_ARRAY_TASK_ID && srun {worker('train', tmp_path)}"
    job = slurm.submit(script, "--array=0-1", "--ntasks=2", folder=tmp_path)
    # Both are under way at once before either goes on.
    for index in (0, 1):
        wait_for((tmp_path / str(index) / "running").exists, "both to run", timeout_s=120)
    for index in (0, 1):
        (tmp_path / str(index) / "go").touch()
    wait_for(lambda: not slurm.run("squeue", "--noheader", f"--job={job}", folder=tmp_path), "the end", timeout_s=60)
    for index in (0, 1):
        assert result(tmp_path / str(index))["world_size"] == 2, (tmp_path / "out").read_text()


@pytest.fixture(scope="module")
def uninterrupted(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    slurm.run("srun", "--ntasks=2", *worker("train", folder, folder=str(folder)).split(), folder=folder)
    return result(folder)


def test_requeued_job_goes_on(slurm: Slurm, tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    """As after a preemption: SLURM ends it with SIGTERM and starts it again."""
    script = f"echo start $SLURM_RESTART_COUNT; srun {worker('train', tmp_path, folder=str(tmp_path), holds_at=3)}"
    job = slurm.submit(script, "--requeue", "--ntasks=2", folder=tmp_path)
    wait_for((tmp_path / "running").exists, "the run to be at its third step", timeout_s=120)
    slurm.run("scontrol", "requeue", job, folder=tmp_path)
    (tmp_path / "go").touch()
    slurm.wait(job, "PENDING", folder=tmp_path)
    assert slurm.wait(job, folder=tmp_path) == "COMPLETED"
    ended = result(tmp_path)
    assert 2 < ended["begun"][0] < 20
    assert ended["weights"] == uninterrupted["weights"]
    assert "start 1" in (tmp_path / "out").read_text()


def script_of_the_page(command: str) -> str:
    """Return the script of docs/clusters/slurm.md, cut down to two tasks on one node without GPUs."""
    page = Path(__file__).parents[2] / "docs/clusters/slurm.md"
    lines = page.read_text(encoding="utf-8").split("```bash\n#!/bin/bash\n")[1].split("```")[0].splitlines()
    kept = "\n".join(line for line in lines if "--gpus" not in line and "--cpus" not in line)
    changes = {"--nodes=2": "--nodes=1", "--ntasks-per-node=8": "--ntasks-per-node=2", "python train.py": command}
    for old, new in changes.items():
        assert old in kept
        kept = kept.replace(old, new)
    return kept


def test_script_of_the_page_saves_and_requeues_at_the_signal(
    slurm: Slurm, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    """`scancel --signal` sends at once, and to the same processes, what `--signal=TERM@120` has SLURM send in time."""
    script = script_of_the_page(worker("train", tmp_path, folder=str(tmp_path), holds_at=3))
    job = slurm.submit(script, folder=tmp_path)
    wait_for((tmp_path / "running").exists, "the run to be at its third step", timeout_s=120)
    slurm.run("scancel", "--signal=USR1", job, folder=tmp_path)
    slurm.run("scancel", "--signal=TERM", job, folder=tmp_path)
    (tmp_path / "go").touch()
    slurm.wait(job, "PENDING", folder=tmp_path)
    assert slurm.wait(job, folder=tmp_path) == "COMPLETED"
    assert 2 < result(tmp_path)["begun"][0] < 20
    assert result(tmp_path)["weights"] == uninterrupted["weights"]


def test_scancel_ends_a_run_with_a_checkpoint(slurm: Slurm, tmp_path: Path) -> None:
    command = worker("train", tmp_path, folder=str(tmp_path), holds_at=3)
    job = slurm.submit(f"srun {command}", "--ntasks=2", folder=tmp_path)
    wait_for((tmp_path / "running").exists, "the run to be at its third step", timeout_s=120)
    slurm.run("scancel", job, folder=tmp_path)
    (tmp_path / "go").touch()
    assert slurm.wait(job, folder=tmp_path) == "CANCELLED"
    newest = max(int(each.name.split("-")[1]) for each in (tmp_path / "runs").glob("checkpoint-*"))
    assert 2 < newest < 20, (tmp_path / "out").read_text(encoding="utf-8")
