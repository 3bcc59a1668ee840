"""A process group of one: how it comes and goes. Several processes: tests/distributed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from hftrain.core.errors import ConfigError, StrategyError
from hftrain.strategies.ddp import DDPStrategy
from hftrain.strategies.distributed import check_backend


@pytest.fixture
def strategy() -> Iterator[DDPStrategy]:
    strategy = DDPStrategy(use_cpu=True)
    yield strategy
    strategy.close()


@pytest.mark.parametrize("num", [1, 2])
def test_backend_may_let_go_of_its_tensors_before_the_group_goes(
    strategy: DDPStrategy, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    # The abort at exit that this prevents comes once in some hundred runs; here only the order is held.
    done: list[str] = []
    destroy = dist.destroy_process_group
    monkeypatch.setattr(time, "sleep", lambda seconds: done.append("waited"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: (done.append("destroyed"), destroy())[1])
    strategy.launch()
    strategy.world_size = num
    strategy.close()
    assert done == ["waited", "destroyed"][2 - num :]


def test_close_puts_torchs_exception_hook_back(strategy: DDPStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.excepthook
    strategy.launch()
    strategy.close()
    assert sys.excepthook is before
    monkeypatch.setattr(sys, "excepthook", before)
    strategy.launch()
    sys.excepthook = print
    strategy.close()
    assert sys.excepthook is print


def test_processes_that_do_not_meet_are_refused(monkeypatch: pytest.MonkeyPatch, strategy: DDPStrategy) -> None:
    from accelerate import PartialState

    PartialState(cpu=True)  # made before the launcher's variables are there, so it stays single
    monkeypatch.setenv("WORLD_SIZE", "2")
    launched = DDPStrategy(use_cpu=True)
    with pytest.raises(StrategyError, match="accelerate set up 1, so each would train alone"):
        launched.launch()
    assert not dist.is_initialized()
    assert PartialState().initialized  # somebody else's, so it is left alone


@pytest.mark.parametrize(
    ("backend", "device_type"), [("gloo", "cpu"), ("gloo", "cuda"), *([("nccl", "cuda")] * dist.is_nccl_available())]
)
def test_backend_that_serves_the_device_is_taken(backend: str, device_type: str) -> None:
    check_backend(backend, device_type)


@pytest.mark.parametrize("backend", ["glooo", "nccl", "undefined", "fake", "hccl"])
def test_backend_that_does_not_serve_the_cpu_is_refused(backend: str) -> None:
    with pytest.raises(ConfigError, match=r"Use one of \['gloo'"):
        DDPStrategy(use_cpu=True, backend=backend)
    assert not dist.is_initialized()


LEFT_GROUPS = """
import gc, os, signal, torch
from hftrain import precisions
from hftrain.strategies.ddp import DDPStrategy

gc.disable()
for _ in range(3):
    strategy = DDPStrategy(use_cpu=True)
    strategy.launch()
    policy = precisions.create("fp32").policy
    garbage = [strategy.setup(torch.nn.Linear(2, 1), lambda model: torch.optim.SGD(model.parameters()), policy)]
    garbage.append(garbage)
    strategy.close()
    del garbage
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    gc.collect()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_forked_process_lives_although_left_groups_are_garbage() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LEFT_GROUPS], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout.split()[-1:] == ["0"]  # older versions of torch say there that they are connected
