"""Fixtures of every test.

Shared code lives in `tests/support/` and is imported as ``from support.models import ...``: `pythonpath = ["tests"]`
in pyproject.toml puts `tests/` on the import path, here and in the processes that `run_distributed` starts.

- `leave_no_trace` (automatic): the test starts from seeded generators and fails if it leaves something behind.
- `tmp_cwd`: an empty folder as working directory.
- `hub`: a Hub on the loopback that huggingface_hub talks to.
- `store`: an empty store in memory, behind `support.remote.URL`.
- `run_distributed`, `launch_distributed`: real processes under torchrun.
"""

from __future__ import annotations

import os

# Before torch is imported. Tiny models run fastest on one thread, and nothing may reach for the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Compile in this process: a pool of compiler processes would outlive the test that started it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import DistributedRun, launch
from support.marked import may_hold, named
from support.police import Snapshot
from support.torch_sim.build import why_not as why_not_sim

from hftrain.core.extras import is_available
from hftrain.core.log import warn_once
from hftrain.core.seed import preserved_rng, set_seed
from hftrain.extras.trackers import choice

OPTIMIZER_PACKAGES = (
    "apollo-torch",
    "bitsandbytes",
    "galore-torch",
    "grokadamw",
    "lomo-optim",
    "schedulefree",
    "torch-optimi",
    "torchao",
    "transformers",
)
CLIENTS = ("trl", "adapters", "pylate")
DEVICES: dict[str, tuple[Callable[[], bool], str]] = {
    "cuda": (torch.cuda.is_available, "torch sees no GPU"),
    "mps": (torch.backends.mps.is_available, "torch sees no Apple GPU"),
    "xla": (lambda: is_available("torch_xla"), "torch_xla is not installed"),
    "sim": (lambda: why_not_sim() is None, f"{why_not_sim()}"),
    "ray": (lambda: is_available("ray"), "ray is not installed"),
    "deepspeed": (lambda: is_available("deepspeed"), "deepspeed is not installed"),
    "remote": (lambda: is_available("s3fs") and is_available("moto"), "s3fs or moto is not installed"),
    "optimizers": (
        lambda: all(map(is_available, OPTIMIZER_PACKAGES)),
        f"not all of {', '.join(OPTIMIZER_PACKAGES)} are installed",
    ),
    "clients": (lambda: any(map(is_available, CLIENTS)), f"none of {', '.join(CLIENTS)} is installed"),
    "interop": (
        lambda: is_available("transformers") and is_available("datasets"),
        "transformers or datasets is not installed",
    ),
}


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts into the background this way; tests, and the processes they start, are to hear it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect only test files that may hold a test of ``-m``.

    The doctests are in src/, and importing a script that lies beside tests would run it.
    """
    if collection_path.suffix != ".py":
        return None
    wanted = collection_path.name.startswith("test_") and may_hold(collection_path, config.option.markexpr)
    return None if wanted else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests whose device or package is absent, and say which."""
    ours = {line.partition(":")[0] for line in config.getini("markers")}
    for item in items:
        for mark in {marker.name for marker in item.iter_markers()} & ours:
            if mark not in named(item.path):
                raise pytest.UsageError(f"{item.nodeid} has the mark {mark}, which -m would not find in its file.")
    missing = {mark: reason for mark, (is_present, reason) in DEVICES.items() if not is_present()}
    for item in items:
        for mark in missing.keys() & {marker.name for marker in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=missing[mark]))


def pytest_collection_finish() -> None:
    """Let Python collect the garbage of tests only, instead of looking through a million objects of all test files."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leave_no_trace(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start from seeded generators and unseen warnings; fail the test that leaves something behind."""
    folder = request.config.rootpath
    before = Snapshot.take(folder)
    warn_once.cache_clear()
    with preserved_rng():
        set_seed(0)
        yield
    _reset_accelerate()
    leaks = before.leaks(folder)
    before.restore()
    if leaks:
        pytest.fail("The test leaves behind: " + "; ".join(leaks), pytrace=False)


def _reset_accelerate() -> None:
    """Forget accelerate's process-wide singletons, which are meant to live as long as a process."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def no_tracker_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no tracker that happens to be installed where a test does not name it; they are on by default."""
    monkeypatch.setattr(choice, "available_loggers", list)


@pytest.fixture
def tmp_cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder the working directory, and return it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Hub that huggingface_hub talks to, logged in as alice."""
    from support.hub_server import running_hub

    with running_hub(monkeypatch) as server:
        yield server


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from support.remote import empty_store

    with empty_store(monkeypatch, tmp_path / "cache"):
        yield


@pytest.fixture
def launch_distributed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., DistributedRun]:
    """Return `support.distributed.launch` with a fresh folder for each call; for runs that are meant to fail."""

    def launch_in_new_folder(target: Callable[..., Any] | str, **options: Any) -> DistributedRun:
        return launch(target, tmp_path_factory.mktemp("distributed"), **options)

    return launch_in_new_folder


@pytest.fixture
def run_distributed(launch_distributed: Callable[..., DistributedRun]) -> Callable[..., list[Any]]:
    """Return a function like `launch_distributed` that gives the ranks' answers and fails unless all have ended well.

    Called as ``run_distributed(target, num_processes=2, **kwargs)``; `timeout_s` and `env` are the launch's, other
    keyword arguments go to the target as JSON.
    """

    def run(
        target: Callable[..., Any] | str,
        num_processes: int = 2,
        *,
        timeout_s: float = 240.0,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        ended = launch_distributed(
            target, num_processes=num_processes, kwargs=kwargs, env=env, timeout_s=timeout_s, forks=True
        )
        if ended.returncode != 0:
            pytest.fail(f"Exit status {ended.returncode} after {ended.elapsed_s:.0f} s:\n{ended.output}", pytrace=False)
        return ended.results

    return run
