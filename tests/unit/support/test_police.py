"""The fixture that polices the other tests must itself catch what it is for."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import police
from support.police import Snapshot


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        (lambda _: os.environ.update(HFTRAIN_TEST_LEAK="1"), "environment variable HFTRAIN_TEST_LEAK"),
        (lambda _: torch.set_default_dtype(torch.float64), "default dtype"),
        (lambda _: torch.set_grad_enabled(False), "grad mode"),
        (lambda _: torch.set_float32_matmul_precision("high"), "matmul precision"),
        (lambda _: torch.use_deterministic_algorithms(True, warn_only=True), "deterministic"),
        (lambda _: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark), "cudnn.benchmark"),
        (lambda _: logging.getLogger("hftrain").addHandler(logging.NullHandler()), "handler"),
        (lambda _: signal.signal(signal.SIGTERM, lambda *_: None), "SIGTERM"),
        (lambda folder: (folder / "left.txt").touch(), "left.txt"),
        (lambda folder: (folder / "runs/left").mkdir(parents=True), "runs/left"),
        (
            lambda folder: torch.distributed.init_process_group(
                "gloo", init_method=f"file://{folder}/.store", rank=0, world_size=1
            ),
            "process group",
        ),
    ],
)
def test_police_names_a_leak_and_mends_it(leak: Callable[[Path], Any], named: str, tmp_path: Path) -> None:
    before = Snapshot.take(tmp_path)
    assert before.leaks(tmp_path) == []
    leak(tmp_path)
    leaks = before.leaks(tmp_path)
    before.restore()
    assert len(leaks) >= 1
    assert any(named in found for found in leaks)
    assert [found for found in before.leaks(tmp_path) if "file or folder" not in found] == []


def test_police_names_a_thread_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(police, "_GRACE_S", 0.1)
    before, may_end = Snapshot.take(tmp_path), threading.Event()
    thread = threading.Thread(target=may_end.wait, name="straggler")
    thread.start()
    assert before.leaks(tmp_path) == ["thread straggler"]
    may_end.set()
    thread.join()
    assert before.leaks(tmp_path) == []


def test_police_kills_a_process_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(police, "_GRACE_S", 0.1)
    before = Snapshot.take(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert f"process {process.pid}" in before.leaks(tmp_path)[0]
        before.restore()
        assert process.wait(timeout=10) != 0


def test_every_test_starts_from_the_same_seed() -> None:
    random.seed(0)
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(0)))
