"""Output folders that machines share, or do not: what is wrong with them is said before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.machines import NAMES, two_machines

pytestmark = pytest.mark.machines

SCRIPT = """
import os, socket
from pathlib import Path
from support.tiny import Net, make_arguments, make_rows
from hftrain import ConfigError, Trainer, TrainerCallback, set_seed

HOST = socket.gethostname()

class Steps(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        print(f"{label} STEP {state.global_step}", flush=True)

def attempt(name, folder, **options):
    global label
    label = name
    set_seed(3)
    defaults = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    args = make_arguments(Path(folder), **{**defaults, **options})
    try:
        trainer = Trainer(Net(), args, train_dataset=make_rows(24), callbacks=[Steps()], strategy="ddp")
        trainer.train(resume_from_checkpoint="auto")
        print(f"{name} ENDED AT {trainer.state.global_step}", flush=True)
    except ConfigError as error:
        print(f"{name} REFUSED {error}", flush=True)

attempt("shared", "run")
attempt("shared resumed", "run", max_steps=6)
attempt("own", "disk/run", save_on_each_node=True)
attempt("own resumed", "disk/run", save_on_each_node=True, max_steps=6)
attempt("own not said", "disk/other")
attempt("shared said to be own", "both", save_on_each_node=True)
attempt("two paths", f"path-{HOST}")
attempt("two paths said to be own", f"own-{HOST}", save_on_each_node=True)
attempt("read-only", "locked/run")
"""


def test_folders_are_looked_at_before_the_first_step(tmp_path: Path) -> None:
    disks = {name: tmp_path / f"disk-{name}" for name in NAMES}
    for folder in ("disk", "locked", *disks.values()):
        (tmp_path / folder).mkdir()
    with two_machines(tmp_path) as machines:
        machines.start("north", SCRIPT, disks={tmp_path / "disk": disks["north"]})
        machines.start("south", SCRIPT, disks={tmp_path / "disk": disks["south"], tmp_path / "locked": None})
        assert [machines.wait(name) for name in NAMES] == [0, 0]
        logs = [machines.log(name) for name in NAMES]
    refusals = {
        "own not said": f"What north writes to {tmp_path}/disk/other, south does not find in {tmp_path}/disk/other.",
        "shared said to be own": f"south ({tmp_path}/both) and north ({tmp_path}/both) write to the same storage.",
        "two paths": f"What north writes to {tmp_path}/path-north, south does not find in {tmp_path}/path-south.",
        "read-only": f"south cannot write there: [Errno 30] Read-only file system: '{tmp_path}/locked/run",
    }
    for log in logs:
        for name, reason in refusals.items():
            assert f"{name} REFUSED Cannot save checkpoints to {tmp_path}" in log
            assert reason in log
            assert f"{name} STEP" not in log
        for name in ("shared", "own", "two paths said to be own"):
            assert f"{name} ENDED AT 4" in log
        for name in ("shared", "own"):
            assert f"{name} resumed STEP 4" in log
            assert f"{name} resumed STEP 3" not in log
            assert f"{name} resumed ENDED AT 6" in log
    for name, disk in disks.items():
        assert (disk / "run/checkpoint-6/model.safetensors").is_file()
        assert [path.name for path in (disk / "run").glob(".*")] == [], name
