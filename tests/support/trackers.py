"""Real runs with real trackers: each in a process of its own, as trackers change what belongs to the whole process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).parents[1]
_RUN = """
import json, sys
from hftrain import Trainer
from support.tiny import Net, make_arguments, make_rows

class Configured(Net):
    config = {"hidden_size": 8, "nested": {"depth": 1}}

options = json.loads(sys.argv[1])
resume = options.pop("resume", None)
args = make_arguments("out", **{"num_train_epochs": 1, "eval_strategy": "epoch", "run_name": "my run", **options})
rows = make_rows(8)
trainer = Trainer(Configured(), args, train_dataset=rows, eval_dataset=rows)
trainer.train(resume_from_checkpoint=resume)
trainer.predict(rows)
with open("history.json", "w") as file:
    json.dump(trainer.state.log_history, file)
"""


def needs(*packages: str) -> list[Any]:
    """Return the marks of a test that trains with a tracker: skipped where its packages are not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return [pytest.mark.trackers, pytest.mark.skipif(bool(missing), reason=f"{missing} not installed")]


def train(folder: Path, *, env: dict[str, str] | None = None, script: str = _RUN, **options: Any) -> str:
    """Train for two steps in a new process, evaluate and predict; return what it printed.

    Args:
        folder: Its working directory.
        env: Environment variables.
        script: What to run instead.
        **options: Training arguments, as JSON; `resume` is for `train()`.
    """
    known = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(_TESTS), *([known] if known else [])])
    file = folder / "script.py"  # some trackers read the source of what they track
    file.write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(file), json.dumps(options)],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "PYTHONPATH": path, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    if done.returncode != 0:
        pytest.fail(f"Exit status {done.returncode}:\n{done.stdout[-4000:]}", pytrace=False)
    return done.stdout


def logged(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return what the last run in a folder has logged under a name: (step, value)."""
    history = json.loads((folder / "history.json").read_text(encoding="utf-8"))
    return [(entry["step"], entry[name]) for entry in history if name in entry]
