"""Take the machine away from a training, start it again, and compare it with an uninterrupted run.

python examples/preemption.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import train_on_cluster

runs = Path("runs/preemption")
shutil.rmtree(runs, ignore_errors=True)
runs.mkdir(parents=True)


# %% start
def start(name: str) -> subprocess.Popen[bytes]:
    """Start the training in a process of its own, as a scheduler does."""
    log = (runs / f"{name}.txt").open("a")
    return subprocess.Popen([sys.executable, train_on_cluster.__file__, runs / name], stdout=log, stderr=log)


assert start("uninterrupted").wait() == 0

# %% preempt
job = start("preempted")
while not (runs / "preempted/checkpoint-100").exists():
    assert job.poll() is None, (runs / "preempted.txt").read_text()
    time.sleep(0.01)
job.terminate()  # sends SIGTERM
print("exit status:", job.wait())
requeue = json.loads((runs / "preempted/requeue.json").read_text())
print("requeue.json:", requeue)

# %% resume
assert start("preempted").wait() == 0


# %% compare
def last_checkpoint(name: str) -> tuple[bytes, list[float]]:
    """Return the weights after the last step, and all losses."""
    folder = runs / name / "checkpoint-400"
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return (folder / "model.safetensors").read_bytes(), [entry["loss"] for entry in history if "loss" in entry]


(weights, losses), (weights_preempted, losses_preempted) = map(last_checkpoint, ("uninterrupted", "preempted"))
print("same weights, bit for bit:", weights == weights_preempted)
print("same losses, bit for bit:", losses == losses_preempted)
assert weights == weights_preempted
assert losses == losses_preempted

# %% samples
_, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
steps = range(5, 401, 5)
axis.plot(steps, losses, linewidth=5, alpha=0.3, label="uninterrupted")
axis.plot(steps, losses_preempted, color="black", linewidth=1, label="preempted and resumed")
axis.axvline(int(requeue["checkpoint"].split("-")[1]), linestyle="--", color="tab:red", label="SIGTERM")
axis.set(xlabel="step", ylabel="loss")
axis.legend()
plt.savefig(runs / "losses.svg")
