"""Every launcher by its variables; `tests/distributed/test_slurm.py` and `test_mpi.py` start the real ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hftrain.core.errors import ConfigError
from hftrain.core.launcher import Launch, announce_launch, first_of_node_list, read_launch

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def openmpi(rank: int, world_size: int, *, local_rank: int = 0, local_world_size: int = 1) -> dict[str, str]:
    start = "OMPI_COMM_WORLD_"
    said = {"RANK": rank, "SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_world_size}
    return {"PMIX_RANK": str(rank), **{start + name: str(value) for name, value in said.items()}}


def slurm(rank: int, tasks: str, *, gtids: str, node: int = 0, nodes: str = "n1") -> dict[str, str]:
    """Return what slurm-wlm 22.05 sets in a task of a step, as seen; `tasks` is by node."""
    ids = gtids.split(",")
    count = {"2": 2, "4": 4, "2(x2)": 4, "1(x2)": 2, "2,1": 3}[tasks]
    return {
        **{"SLURM_JOB_ID": "70", "SLURM_STEP_ID": "1", "SLURM_NTASKS": str(count), "SLURM_PROCID": str(rank)},
        **{"SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)},
        **{"SLURM_LOCALID": str(ids.index(str(rank))), "SLURM_GTIDS": gtids, "SLURM_STEP_NODELIST": nodes},
    }


# As seen too: what its script has, and the shell of `salloc --ntasks=2`.
BATCH = {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "3", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0"}
SALLOC = {"SLURM_JOB_ID": "72", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}

JSM = {f"JSM_NAMESPACE_{name}": value for name, value in [("RANK", "3"), ("SIZE", "4")]}
JSM_LOCAL = {"JSM_NAMESPACE_LOCAL_RANK": "1", "JSM_NAMESPACE_LOCAL_SIZE": "2"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
MVAPICH = {f"MV2_COMM_WORLD_{name}": value for name, value in [("RANK", "3"), ("SIZE", "4")]}
MVAPICH |= {"MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "2"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
KUBEFLOW = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    """Put variables into an environment that no launcher has touched, and take them out again."""
    starts = (*TORCH, "SLURM_", "OMPI_", "PMI", "MPI_", "MV2_", "JSM_", "LSB_", "PBS_")
    for name in [name for name in os.environ if name.startswith(starts)]:
        monkeypatch.delenv(name)
    for name in TORCH:  # whatever the test makes of them, they are gone after it
        monkeypatch.setenv(name, "")

    def put(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    ("variables", "launcher", "rank", "world_size", "local_rank", "local_world_size"),
    [
        (TORCHRUN, "torchrun", 3, 4, 1, 2),
        (KUBEFLOW, "torchrun", 1, 2, None, None),
        (openmpi(3, 4, local_rank=1, local_world_size=2), "Open MPI", 3, 4, 1, 2),
        (MVAPICH, "MVAPICH2", 3, 4, 1, 2),
        (HYDRA, "MPICH", 3, 4, 1, 2),
        (PALS, "PALS", 3, 4, 1, 2),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, "PMI", 3, 4, None, None),
        (slurm(3, "2(x2)", gtids="2,3", node=1), "SLURM", 3, 4, 1, 2),
        (slurm(0, "2(x2)", gtids="0,1"), "SLURM", 0, 4, 0, 2),
        (slurm(1, "2(x2)", gtids="1,3", node=1), "SLURM", 1, 4, 0, 2),
        (slurm(2, "2,1", gtids="2", node=1), "SLURM", 2, 3, 0, 1),
        (JSM | JSM_LOCAL, "LSF", 3, 4, 1, 2),
        # One inside the other.
        (slurm(1, "1(x2)", gtids="1", node=1) | TORCHRUN, "torchrun", 3, 4, 1, 2),
        (slurm(1, "1(x2)", gtids="1", node=1) | HYDRA, "MPICH", 3, 4, 1, 2),
        (slurm(1, "2", gtids="0,1") | {"PMI_RANK": "1", "PMI_SIZE": "2", "PMIX_RANK": "1"}, "SLURM", 1, 2, 1, 2),
        ({"WORLD_SIZE": "9"} | slurm(1, "2", gtids="0,1"), "SLURM", 1, 2, 1, 2),
        # What tells a part, or that it is none.
        ({"WORLD_SIZE": "4"}, "torchrun", 0, 4, None, None),
        ({"WORLD_SIZE": "1", "PMIX_RANK": "0"}, "torchrun", 0, 1, None, None),
        ({"RANK": "-1", "WORLD_SIZE": "-1", "LOCAL_RANK": "-1"}, None, 0, 1, None, None),
    ],
)
def test_launcher_is_told_by_its_variables(
    launched, variables, launcher, rank, world_size, local_rank, local_world_size
) -> None:
    launched(variables)
    assert read_launch() == Launch(
        launcher=launcher, rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size
    )


@pytest.mark.parametrize(
    "variables",
    [
        {},
        BATCH,
        SALLOC,
        slurm(0, "2", gtids="0,1") | {"SLURM_STEP_NUM_TASKS": "1"},
        # Submitted by a task of a job with two tasks, whose variables it inherits.
        slurm(0, "2", gtids="0,1") | BATCH,
        openmpi(0, 1),
        # Left in a shell, or set to nothing.
        {"RANK": "1", "LOCAL_RANK": "1"},
        {"PMIX_RANK": ""},
    ],
)
def test_process_that_is_alone_has_no_launcher(launched, variables) -> None:
    launched(variables)
    assert read_launch() == Launch()


TASK = """
import os, subprocess, sys
os.environ["SLURM_TASK_PID"] = str(os.getpid())
read = "from hftrain.core.launcher import read_launch; print(read_launch().world_size)"
subprocess.run([sys.executable, "-c", read], preexec_fn=os.setpgrp if "command" in sys.argv else None, check=True)
"""


@pytest.mark.parametrize(
    ("has_terminal", "started_by", "world_size"), [(True, "command", 1), (True, "script", 2), (False, "command", 2)]
)
def test_shell_of_several_tasks_is_alone(has_terminal, started_by, world_size) -> None:
    """A shell gives a command its own process group; `srun` there starts tasks that inherit SLURM_PTY_PORT.

    SLURM makes the task that has the terminal the leader of a session. Nothing else of a terminal takes part here.
    """
    variables = slurm(0, "2", gtids="0,1") | {"SLURM_PTY_PORT": "40000"}
    command = [sys.executable, "-c", TASK, started_by]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE"))}
    kwargs = {"stdin": subprocess.DEVNULL, "text": True, "env": {**env, **variables}, "start_new_session": has_terminal}
    assert int(subprocess.check_output(command, **kwargs)) == world_size


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK='1'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK must be below WORLD_SIZE"),
    ],
)
def test_contradiction_is_refused(launched, variables, said) -> None:
    launched(variables)
    with pytest.raises(ConfigError, match=said):
        read_launch()


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (slurm(1, "2", gtids="0,1"), ("127.0.0.1", 15000 + 70 + 4099)),
        (slurm(0, "2", gtids="0,1") | {"SLURM_STEP_ID": "2"}, ("127.0.0.1", 15000 + 70 + 2 * 4099)),
        (slurm(3, "2(x2)", gtids="2,3", node=1, nodes="gpu[07-8,3]"), ("gpu07", 15000 + 70 + 4099)),
        (slurm(1, "2", gtids="0,1") | {"MASTER_ADDR": "head", "MASTER_PORT": "2000"}, ("head", 2000)),
        (openmpi(1, 2) | SALLOC, ("n1", 15000)),
        (openmpi(1, 2) | {"LSB_MCPU_HOSTS": "a1 4 a2 4"}, ("a1", 15000)),
        (openmpi(1, 2), (None, 15000)),
        (JSM | JSM_LOCAL | {"LSB_MCPU_HOSTS": "launch 1 a1 4 a2 4"}, ("a1", 15000)),
        (KUBEFLOW, ("job-master-0", 23456)),
    ],
)
def test_processes_agree_on_where_to_meet(launched, variables, place) -> None:
    launched(variables)
    before = read_launch()
    announce_launch()
    after = read_launch()
    assert (after.launcher, after.rank, after.world_size) == ("torchrun", before.rank, before.world_size)
    assert after.local_rank == (before.local_rank or 0)
    assert (os.environ["MASTER_ADDR"] or None, int(os.environ["MASTER_PORT"])) == place


def test_two_starts_meet_at_two_ports(launched) -> None:
    ports = set()
    for namespace in ("prterun-host-100@1", "prterun-host-200@1"):
        launched(openmpi(0, 2) | dict.fromkeys(TORCH, "") | {"PMIX_NAMESPACE": namespace})
        announce_launch()
        ports.add(os.environ["MASTER_PORT"])
    assert len(ports) == 2


def test_process_that_is_alone_announces_nothing(launched) -> None:
    launched(BATCH)
    announce_launch()
    assert not any(os.environ[name] for name in TORCH)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node[01-03,7]", "node01"),
        ("a,b[1-2]", "a"),
        ("x[1-2]y[03,4]-z,other", "x1y03-z"),
        ("rack-1-[9,10-12]", "rack-1-9"),
    ],
)
def test_first_node_of_a_list(nodes, first) -> None:
    assert first_of_node_list(nodes) == first
