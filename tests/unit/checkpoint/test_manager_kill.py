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
    committed, save_s = 0, 0.05
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(15):
            process.stdin.write("go\n")
            process.stdin.flush()
            pid, num_commits, wanted, begun_s = None, 0, choose.randrange(4), time.monotonic()
            # The moment is counted in saves, and within one in the time that a save takes here: a machine that is busy
            # with something else gives a process no time to commit in within any number of seconds.
            while pid is None or num_commits < wanted:  # what the new process commits may come before its number
                line = process.stdout.readline().split()
                if len(line) == 1:
                    pid = int(line[0])
                else:
                    num_commits, committed = num_commits + 1, max(committed, int(line[1]))
                    save_s, begun_s = time.monotonic() - begun_s, time.monotonic()
            time.sleep(choose.uniform(0, save_s))
            os.kill(pid, signal.SIGKILL)
            while (line := process.stdout.readline()) != "dead\n":
                committed = max(committed, int(line.split()[1]))
            latest = make_manager().latest()
            assert (0 if latest is None else verify(latest).step) >= committed
        process.stdin.close()
    assert committed > 1
    save_at(make_manager(), committed + 10)
    assert {checkpoint_step(path) is not None for path in output_dir.iterdir()} == {True}
