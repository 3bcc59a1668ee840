"""How this process and its siblings were launched, by the launcher's variables, and what accelerate holds of it."""

from __future__ import annotations

import os
import re
import sys
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from hftrain.core.errors import ConfigError

STARTED_IN = os.getcwd()  # most scripts that change it do so after their imports


class _Names(NamedTuple):
    """Environment variables in which a launcher describes the current process."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str | None = None
    local_world_size: str | None = None


def _prefixed(launcher: str, prefix: str) -> _Names:
    return _Names(launcher, *(prefix + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


_TORCH = _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# The step's size is read, not SLURM_NTASKS, which a batch script and `salloc` also have although they run alone.
_SLURM = _Names("SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_GTIDS")
_LSF = _prefixed("LSF", "JSM_NAMESPACE_")
# The first entry whose variables, but the last, are set is used. mpirun before SLURM, which starts mpirun's helpers.
_LAUNCHERS = (
    _prefixed("Open MPI", "OMPI_COMM_WORLD_"),
    _prefixed("MVAPICH2", "MV2_COMM_WORLD_"),
    _Names("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _prefixed("PALS", "PMI_"),
    _SLURM,
    _LSF,
    _Names("PMI", "PMI_RANK", "PMI_SIZE"),
)
# Variables that identify a launch, so that two launches on a machine use different ports.
_START_IDS = ("PMIX_NAMESPACE", "LSB_JOBID", "PBS_JOBID")
# Below Linux's ephemeral port range; the number of ports is a prime.
_FIRST_PORT, _NUM_PORTS = 15000, 16381


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The launcher's description of this process.

    Args:
        launcher: Its name; None without a launcher, or if it started a single process (except torchrun).
        rank: The global rank of this process.
        local_rank: The rank of this process on its machine; None if unknown.
        local_world_size: The number of processes on this machine; None if unknown.
    """

    launcher: str | None = None
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None


def read_launch() -> Launch:
    """Return the description read from the current environment.

    RANK and WORLD_SIZE are used if both are set, as by torchrun, `accelerate launch`, Kubeflow and Ray Train;
    otherwise the variables of `_LAUNCHERS`.

    Raises:
        ConfigError: A variable does not hold a number, or a launcher sets the rank but not the number of processes.
    """
    rank, world_size = _number(_TORCH.rank), _number(_TORCH.world_size)
    if rank is None or world_size is None:
        for names in _LAUNCHERS:
            if all(_number(name) is not None for name in names[1:4] if name):
                return Launch() if _is_alone(names) else _read(names)
        if os.environ.get("PMIX_RANK") and world_size is None:
            raise ConfigError(
                f"Cannot run as PMIX_RANK={os.environ['PMIX_RANK']!r}:",
                "the launcher sets the rank, but not the number of processes.",
                "Start with torchrun, srun or Open MPI's mpirun, or set RANK, LOCAL_RANK and WORLD_SIZE.",
            )
    return _read(_TORCH)


def announce_launch() -> None:
    """Set torch's variables from those of another launcher; mutates `os.environ`, once.

    torch's rendezvous, accelerate and DeepSpeed read only these. MASTER_ADDR and MASTER_PORT are set too unless they
    are set already; an unknown address is left unset.
    """
    launch = read_launch()
    is_foreign = launch.launcher != _TORCH.launcher
    if launch.world_size == 1 or (not is_foreign and _number(_TORCH.rank) is None):
        return
    variables = {
        "RANK": launch.rank,
        "WORLD_SIZE": launch.world_size,
        "LOCAL_RANK": launch.local_rank or 0,
        "LOCAL_WORLD_SIZE": launch.local_world_size,
        "MASTER_ADDR": os.environ.get("MASTER_ADDR") or (_first_machine(launch) if is_foreign else None),
        "MASTER_PORT": os.environ.get("MASTER_PORT") or (_meeting_port(launch) if is_foreign else None),
    }
    os.environ.update({name: str(value) for name, value in variables.items() if value is not None})


def first_of_node_list(nodes: str) -> str:
    """Return the first node of a SLURM node list.

    Example:
        >>> first_of_node_list("gpu[007-012,20]-ib,login1")
        'gpu007-ib'
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0] if match else nodes)


def _read(names: _Names) -> Launch:
    rank, world_size = _number(names.rank) or 0, _number(names.world_size)
    if world_size is None:
        # A stale RANK in the shell must be ignored: a single process with rank 1 would save no model.
        return Launch()
    if rank >= world_size:
        raise ConfigError(
            f"Cannot run as {names.rank}={rank} of {names.world_size}={world_size}:",
            f"ranks count from 0, so {names.rank} must be below {names.world_size}.",
            "Correct the two variables, or unset what another launcher left behind.",
        )
    return Launch(
        launcher=names.launcher,
        rank=rank,
        world_size=world_size,
        local_rank=_number(names.local_rank),
        local_world_size=_number(names.local_world_size),
    )


def _is_alone(names: _Names) -> bool:
    """Return whether a launcher started only one process, even if its variables describe more."""
    if _number(names.world_size) == 1:
        return True
    if names is not _SLURM or _number(names.rank) != 0:
        return False
    # A batch script submitted from a task of another job inherits that task's variables, but not this one.
    on_first_node = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    is_inherited = on_first_node is not None and int(on_first_node[0]) != _number(names.local_world_size)
    return is_inherited or ("SLURM_PTY_PORT" in os.environ and _is_in_shell())


def _is_in_shell() -> bool:
    """Return whether this was started in an `srun --ntasks=4 --pty bash` shell, whose other tasks have ended.

    A shell puts each command into its own process group. Steps started in it inherit its variables, but their tasks
    are not session leaders. With `srun --ntasks=4 --pty python train.py`, this process is the task and leads one.
    """
    task = _number("SLURM_TASK_PID") or 0
    try:
        return os.getsid(task) == task and (os.getpgrp() != task or hasattr(sys, "ps1"))
    except OSError:  # in a container with its own process IDs
        return os.isatty(0)


def _first_machine(launch: Launch) -> str | None:
    if launch.local_world_size == launch.world_size:
        return "127.0.0.1"
    nodes = os.environ.get("SLURM_STEP_NODELIST" if launch.launcher == _SLURM.launcher else "SLURM_JOB_NODELIST")
    if nodes:
        return first_of_node_list(nodes)
    hosts = os.environ.get("LSB_MCPU_HOSTS", "").split()[::2]  # each is followed by its number of slots
    # jsrun starts nothing on the first host, which runs the job script.
    return next(iter(hosts[1:] if launch.launcher == _LSF.launcher else hosts), None)


def _meeting_port(launch: Launch) -> int:
    """Return the rendezvous port: the same for all processes of a launch, usually different for another launch."""
    if launch.launcher == _SLURM.launcher:
        # Jobs of an array are numbered consecutively, and so are the steps of a job.
        offset = (_number("SLURM_JOB_ID") or 0) + 4099 * (_number("SLURM_STEP_ID") or 0)
    else:
        offset = zlib.crc32("".join(os.environ.get(name, "") for name in _START_IDS).encode())
    return _FIRST_PORT + offset % _NUM_PORTS


def _number(name: str | None) -> int | None:
    """Return a variable's integer, or None if it is unset or -1, as some launchers set it outside of a launch."""
    value = os.environ.get(name, "").strip() if name else ""
    if name == _SLURM.local_world_size and value:
        return value.count(",") + 1  # SLURM_GTIDS lists the ranks of this node
    if value and not value.removeprefix("-").isdecimal():
        raise ConfigError(
            f"Cannot use the environment variable {name}={value!r}:",
            "it must be an integer.",
            "Start with torchrun or another launcher that sets it, or unset it.",
        )
    return int(value) if value and int(value) >= 0 else None


# Only `accelerate launch` sets them, the second one with DeepSpeed.
_MARKS = ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "ACCELERATE_CONFIG_DS_FIELDS")


def launched(variable: str) -> str:
    """Return a launcher's variable; nothing without one, where transformers' `TrainingArguments` may have set it."""
    is_alone = os.environ.keys().isdisjoint(_MARKS) and read_launch().launcher is None
    return "" if is_alone else os.environ.get(variable, "")


def is_set(variable: str) -> bool:
    """Return whether a launcher's environment variable is true."""
    return launched(variable).lower() in ("1", "true", "yes")


def lacks_processes() -> bool:
    """Return whether `accelerate launch` started only this process of several, as it does on CPUs.

    It then sets the rendezvous address, but neither it nor MPI sets the number of processes.
    """
    names = (_MARKS[0], "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and read_launch().launcher is None


def accelerate_state(name: str) -> dict[str, Any]:
    """Return a state's dict (of ``"PartialState"``, say), empty before it is created; clear it to allow a new one."""
    module = sys.modules.get("accelerate.state")
    held: dict[str, Any] = {} if module is None else getattr(module, name)._shared_state
    return held


def tell_accelerate_sync(accelerator: Any, syncs: bool) -> None:
    """Tell an `accelerate.Accelerator` whether this micro-step is the last one before an update."""
    from accelerate.state import GradientState

    # The accelerator's own state, and the shared one that prepared optimizers read.
    for state in (accelerator.gradient_state, GradientState()):
        state._set_sync_gradients(syncs)
