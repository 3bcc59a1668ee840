"""Processes to kill: for each line of standard input, fork one that saves until it dies, and wait for its death.

Called with the output folder; prints ``pid``, then ``committed STEP`` after each save, then ``dead``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from hftrain.checkpoint.layout import checkpoint_step
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.weights import save_weights
from hftrain.storage.tensors import save_containers
from hftrain.strategies import SingleDeviceStrategy


def save_until_killed(output_dir: Path) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(64, 64)}}}
    manager = CheckpointManager(output_dir, group=SingleDeviceStrategy(use_cpu=True), save_total_limit=1)
    latest = manager.latest()
    step = 0 if latest is None else checkpoint_step(latest)
    while True:
        step += 1
        for _ in range(2):  # the second save replaces the first
            manager.save(
                step,
                [
                    lambda folder: save_weights(model, folder),
                    lambda folder: save_containers(optimizer, folder / "optimizer.pt"),
                ],
                facts={"step": step},
            )
            os.write(1, f"committed {step}\n".encode())
        manager.rotate()


for _ in sys.stdin:
    pid = os.fork()
    if pid == 0:
        save_until_killed(Path(sys.argv[1]))
    os.write(1, f"{pid}\n".encode())
    os.waitpid(pid, 0)
    os.write(1, b"dead\n")
