"""Two machines for tests: network namespaces with a cable between them, host names and disks of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

import hftrain

NAMES = ("north", "south")
_ADDRESSES = {"north": "10.231.7.1", "south": "10.231.7.2"}
_PATHS = os.pathsep.join(map(str, (Path(__file__).parents[1], Path(hftrain.__file__).parents[1])))
# A machine's own host name, and its own disk, or a view that may not write, under a path that both machines have.
_BOOT = """
mount --make-rprivate / && hostname "$1" && mount --bind "$2" /etc/hosts && shift 2
while [ "$1" != -- ]; do mount --bind "$1" "$2"; [ "$3" = rw ] || mount -o remount,bind,ro "$2"; shift 3; done
shift && exec "$@"
"""


class Machines:
    """Two machines and the cable between them.

    Args:
        folder: Where their output goes, `<name>.log`; both see it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._spaces = {name: f"hft{os.getpid()}{name[0]}" for name in NAMES}
        self._cables = {name: f"c{os.getpid()}{name[0]}" for name in NAMES}

    def open(self) -> str | None:
        """Make the namespaces and the cable; return why that cannot be done, None if it was."""
        if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("unshare") is None:
            return "needs Linux with iproute2 and util-linux"
        try:
            for name in NAMES:
                _ip("netns", "add", self._spaces[name])
            ends = [(self._cables[name], self._spaces[name]) for name in NAMES]
            (first, first_space), (second, second_space) = ends
            _ip(
                "link",
                "add",
                first,
                "netns",
                first_space,
                "type",
                "veth",
                "peer",
                "name",
                second,
                "netns",
                second_space,
            )
            for name in NAMES:
                _ip("-n", self._spaces[name], "addr", "add", f"{_ADDRESSES[name]}/24", "dev", self._cables[name])
                _ip("-n", self._spaces[name], "link", "set", "lo", "up")
                self.plug(name)
        except subprocess.CalledProcessError as error:
            return f"network namespaces are not allowed here: {error.stderr.decode().strip()}"
        return None

    def close(self) -> None:
        """End what runs on the machines, and take them down."""
        for name in [*self.agents]:
            self.kill(name)
        for space in self._spaces.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", space)

    def plug(self, name: str) -> None:
        _ip("-n", self._spaces[name], "link", "set", self._cables[name], "up")

    def unplug(self, name: str) -> None:
        """Pull it out: nothing that is open hears of it."""
        _ip("-n", self._spaces[name], "link", "set", self._cables[name], "down")

    def start(
        self,
        name: str,
        script: str,
        *options: str,
        disks: Mapping[Path, Path | None] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start torchrun on one machine; both meet at north.

        Args:
            name: The machine.
            script: What each process runs, with the shared folder as its working directory.
            options: Of torchrun, instead of one process on each of two machines.
            disks: By path, this machine's own folder to be found there; None makes the path read-only.
            env: Environment variables to add.
        """
        path, hosts = self.folder / "script.py", self.folder / "hosts"
        path.write_text(script, encoding="utf-8")
        lines = ["127.0.0.1 localhost", *(f"{_ADDRESSES[each]} {each}" for each in NAMES)]
        hosts.write_text("\n".join(lines), encoding="utf-8")
        mounts: list[str] = []
        for place, own in (disks or {}).items():
            mounts += [str(own or place), str(place), "rw" if own else "ro"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-id=test"]
        torchrun += [f"--rdzv-endpoint={NAMES[0]}:29400", *(options or ("--nnodes=2",)), str(path)]
        machine = ["ip", "netns", "exec", self._spaces[name], "unshare", "--uts", "--mount", "sh", "-ec", _BOOT]
        own_env = {"PYTHONPATH": _PATHS, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.agents[name] = subprocess.Popen(
                [*machine, "sh", name, str(hosts), *mounts, "--", *torchrun],
                cwd=self.folder,
                env={**os.environ, **own_env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name: str) -> None:
        """Kill all that runs on a machine at once, the agent first; nobody says good-bye."""
        agent = self.agents.pop(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        agent.wait()

    def workers(self, name: str) -> list[psutil.Process]:
        """Return the training processes of a machine that have not ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [each for each in psutil.Process(self.agents[name].pid).children() if _is_worker(each)]
        return []

    def wait(self, name: str, timeout_s: float = 120) -> int:
        """Return the exit status of a machine's agent."""
        return self.agents[name].wait(timeout_s)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text("utf-8", errors="replace")

    def _logs(self) -> str:
        return "\n".join(self.log(name) for name in self.agents)

    def until(self, is_so: Callable[[], bool], timeout_s: float = 120) -> float:
        """Wait until something is so, and return the seconds it took."""
        begun_s = time.monotonic()
        while not is_so():
            if all(agent.poll() is not None for agent in self.agents.values()) and not is_so():
                pytest.fail(f"The machines have ended: {self._logs()}")
            assert time.monotonic() - begun_s < timeout_s, self._logs()
            time.sleep(0.05)
        return time.monotonic() - begun_s


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    """Lend two machines; skips the test, with the reason, where they cannot be made."""
    machines = Machines(folder)
    try:
        reason = machines.open()
        if reason is not None:
            pytest.skip(reason)
        yield machines
    finally:
        machines.close()


def _is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
        return "-u" in process.cmdline()
    return False


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
