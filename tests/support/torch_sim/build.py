"""Build the simulated accelerator: ``python -m support.torch_sim.build``, from the folder `tests`.

The result is kept in a folder that torch's version and the sources name, in the user's cache or where the environment
variable `TORCH_SIM_CACHE` says; whoever imports the device next to a build waits for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = ("device.cpp", "ops.cpp", "autocast.cpp", "collectives.cpp")
NAME = "torch_sim_library"
FLAGS = ("-O1", "-g0", "-fvisibility=hidden")


def present_sources() -> list[Path]:
    return [HERE / name for name in SOURCES if (HERE / name).exists()]


def cache() -> Path:
    """Where the libraries of this torch lie; the compiler's results are kept there, too, for the next change."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    chosen = os.environ.get("TORCH_SIM_CACHE") or Path.home() / ".cache" / "hftrain" / "torch_sim"
    return Path(chosen) / f"torch-{torch.__version__}-{python}"


def library() -> Path:
    """The library of these sources."""
    kept = hashlib.sha256(" ".join(FLAGS).encode())
    for path in [HERE / "sim.h", *present_sources()]:
        kept.update(path.read_bytes())
    return cache() / kept.hexdigest()[:16] / f"{NAME}.so"


def why_not() -> str | None:
    """What this machine lacks to have the device, or None."""
    if sys.platform != "linux":
        return "the simulated accelerator needs Linux"
    if library().exists():
        return None
    missing = [program for program in ("g++", "ninja") if not shutil.which(program)]
    return f"no {' and no '.join(missing)} to build the simulated accelerator with" if missing else None


def build(*, verbose: bool = False) -> Path:
    """Return the library, built by this process or by another unless it is there already."""
    target = library()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(cache() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target, verbose=verbose)
    return target


def _compile(target: Path, *, verbose: bool) -> None:
    """Compile in a process of its own: the compiler's helper loads what it has built, which must happen once."""
    work = cache() / "work"
    work.mkdir(exist_ok=True)
    (work / "lock").unlink(missing_ok=True)  # of a build that was killed
    command = [sys.executable, str(HERE / "build.py"), str(work)]
    done = subprocess.run(command, env={"MAX_JOBS": "2", **os.environ}, capture_output=not verbose, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"The simulated accelerator does not compile:\n{done.stdout or ''}{done.stderr or ''}")
    part = target.with_suffix(".part")
    shutil.copy(work / f"{NAME}.so", part)
    os.replace(part, target)


def _compile_into(work: str) -> None:
    from torch.utils import cpp_extension

    sources = [str(path) for path in present_sources()]
    cpp_extension.load(NAME, sources, extra_cflags=list(FLAGS), build_directory=work, verbose=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _compile_into(sys.argv[1])
    else:
        print(build(verbose=True))
