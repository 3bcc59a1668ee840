"""SIGKILL at random instants of saving: the short form of the sweep."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hftrain.checkpoint.layout import checkpoint_step
from hftrain.checkpoint.manifest import verify


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_sigkill_while_saving_never_costs_a_committed_checkpoint(make_manager, save_at, output_dir):
    choose = random.Random(0)
    command = [sys.executable, str(Path(__file__).with_name("saving_loop.py")), str(output_dir)]
    committed = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(15):
            process.stdin.write("go\n")
            process.stdin.flush()
            pid = None
            while pid is None:  # what the new process commits may come before its number
                line = process.stdout.readline()
                pid = int(line) if line.strip().isdigit() else None
                committed = max(committed, int(line.split()[1])) if pid is None else committed
            time.sleep(choose.uniform(0, 0.15))
            os.kill(pid, signal.SIGKILL)
            while (line := process.stdout.readline()) != "dead\n":
                committed = max(committed, int(line.split()[1]))
            latest = make_manager().latest()
            assert (0 if latest is None else verify(latest).step) >= committed
        process.stdin.close()
    assert committed > 1  # else nothing was ever at stake; a loaded machine commits few
    save_at(make_manager(), committed + 10)
    assert {checkpoint_step(path) is not None for path in output_dir.iterdir()} == {True}
