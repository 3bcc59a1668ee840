"""A cluster of one machine: SLURM's own daemons, on ports and in a folder of their own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scancel", "scontrol")
# More CPUs than the machine may have, and each for several jobs: the tests' processes are small.
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP OverSubscribe=FORCE:4
"""


class Slurm:
    """The cluster.

    Args:
        config: Its slurm.conf.
    """

    def __init__(self, config: Path) -> None:
        self.env = {"SLURM_CONF": str(config)}

    def run(self, *command: str, folder: Path, env: dict[str, str] | None = None, timeout_s: float = 240) -> str:
        """Run a command outside of every job, such as ``srun``, and return what it wrote; raise if it fails."""
        base = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        done = subprocess.run(
            command,
            cwd=folder,
            env={**base, "OMP_NUM_THREADS": "1", **self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def submit(self, script: str, *options: str, folder: Path) -> str:
        """Submit a batch script, and return the job's number; it writes to the file ``out`` of the folder."""
        path = folder / "job.sh"
        path.write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
        common = ("--parsable", "--output=out", "--open-mode=append")
        return self.run("sbatch", *common, *options, str(path), folder=folder).strip()

    def state(self, job: str, *, folder: Path) -> str:
        """Return the state of a job, such as ``"RUNNING"``."""
        told = self.run("scontrol", "show", "job", job, folder=folder)
        return told.split("JobState=")[1].split()[0]

    def wait(self, job: str, *states: str, folder: Path, timeout_s: float = 150) -> str:
        """Wait until a job is in one of some states, by default at its end; return it."""
        ends = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_for(lambda: self.state(job, folder=folder) in ends, f"job {job} to be {ends}", timeout_s=timeout_s)
        return self.state(job, folder=folder)


def wait_for(condition, what: str, *, timeout_s: float = 60) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"Waited {timeout_s} s for {what}.")
        time.sleep(0.1)


def missing() -> list[str]:
    """Return the programs that are not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


@contextlib.contextmanager
def cluster() -> Iterator[Slurm]:
    """Start the daemons, and stop them with all jobs at the end."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    with tempfile.TemporaryDirectory(prefix="slurm") as name, contextlib.ExitStack() as stack:  # short, for its socket
        folder, host = Path(name), socket.gethostname().split(".")[0]
        for inside in ("state", "spool"):
            (folder / inside).mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o600)
        controller_port, node_port = _free_ports(2)
        config = folder / "slurm.conf"
        values = {"controller_port": controller_port, "node_port": node_port, "user": getpass.getuser()}
        config.write_text(CONFIG.format(folder=folder, host=host, **values), encoding="utf-8")
        slurm, log = Slurm(config), stack.enter_context((folder / "log").open("wb"))
        munge = {
            "key-file": "key",
            "socket": "munge.sock",
            "pid-file": "pid",
            "log-file": "munge.log",
            "seed-file": "seed",
        }
        for command in (
            ["munged", "--foreground", "--force", *(f"--{option}={folder}/{file}" for option, file in munge.items())],
            ["slurmctld", "-D"],
            ["slurmd", "-D"],
        ):
            process = subprocess.Popen(command, env={**os.environ, **slurm.env, "PATH": path}, stdout=log, stderr=log)
            stack.callback(_stop, process)
        stack.callback(_cancel_all, slurm, folder)
        try:
            wait_for(lambda: " idle " in _nodes(slurm), "the node to be idle", timeout_s=30)
        except TimeoutError as error:
            raise RuntimeError((folder / "log").read_text(encoding="utf-8", errors="replace")) from error
        yield slurm


def _nodes(slurm: Slurm) -> str:
    command = ["sinfo", "--noheader", "--format= %t "]
    return subprocess.run(command, env={**os.environ, **slurm.env}, capture_output=True, text=True).stdout


def _cancel_all(slurm: Slurm, folder: Path) -> None:
    slurm.run("scancel", "--full", "--signal=KILL", "--user", getpass.getuser(), folder=folder)
    slurm.run("scancel", "--user", getpass.getuser(), folder=folder)
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: not slurm.run("squeue", "--noheader", folder=folder), "all jobs to end", timeout_s=20)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(num: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
