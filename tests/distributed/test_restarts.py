"""A launcher that starts failed processes again: the training goes on by itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.distributed import run_command

import hftrain

pytestmark = pytest.mark.distributed

SCRIPT = """
import json, os, sys
from pathlib import Path
from support.tiny import Net, make_arguments, make_rows
from hftrain import Trainer, TrainerCallback, set_seed

class Fail(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and state.global_step == 5 and os.environ["RANK"] == "1":
            raise ValueError("a bad day")

set_seed(3)
options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2, "resume_from_checkpoint": "auto"}
trainer = Trainer(Net(), make_arguments(Path("run"), **options), train_dataset=make_rows(24), callbacks=[Fail()])
trainer.train()
Path(f"end_{os.environ['RANK']}.json").write_text(
    json.dumps([os.environ["TORCHELASTIC_RESTART_COUNT"], [log["step"] for log in trainer.state.log_history[:8]]])
)
"""


def run_torchrun(folder: Path, script: str) -> tuple[int | None, str]:
    (folder / "script.py").write_text(script, encoding="utf-8")
    paths = [Path(__file__).parents[1], Path(hftrain.__file__).parents[1]]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    env = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    return run_command([*command, "script.py"], folder, env, timeout_s=120)


def test_restarted_processes_meet_and_resume(tmp_path: Path) -> None:
    returncode, output = run_torchrun(tmp_path, SCRIPT)
    assert returncode == 0, output
    assert "ValueError: a bad day" in output
    for rank in range(2):
        assert json.loads((tmp_path / f"end_{rank}.json").read_text()) == ["1", [*range(1, 9)]]


def test_ranks_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    """Nobody waits for them, and the job that is started next may write to the same folder."""
    script = SCRIPT.replace('"max_steps": 8', '"max_steps": 600').replace("import json", "import signal, time, json", 1)
    changes = {
        "        if os.environ": "        time.sleep(0.05)\n        if os.environ",
        'raise ValueError("a bad day")': "os.kill(os.getppid(), signal.SIGKILL)",
    }
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    returncode, output = run_torchrun(tmp_path, script)  # returns when nobody holds the ends of the pipe any more
    assert returncode == -9, output
    for rank in range(2):
        assert f"[rank{rank}]: ended, because torchrun, which started it, is gone" in output
        assert not (tmp_path / f"end_{rank}.json").exists()
