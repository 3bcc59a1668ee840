"""`hftrain replay` on scripts that move, train twice, name no arguments, or resume from elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hftrain import ConfigError
from hftrain.cli.replay import show_replay

SCRIPT = """
import os, sys
import torch
from torch import nn
from hftrain import Trainer, TrainingArguments, set_seed

ROWS = [{"x": row[:4], "labels": row[4]} for row in torch.randn(40, 5, generator=torch.Generator().manual_seed(0))]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, x, labels):
        return {"loss": (self.layers(x).squeeze(1) - labels).square().mean()}


def trainer_in(folder, rows=ROWS, **options):
    set_seed(0)
    options = {"max_steps": 12, "save_steps": 5, "report_to": "none", "disable_tqdm": True, **options}
    args = TrainingArguments(folder, per_device_train_batch_size=4, use_cpu=True, **options) if folder else None
    return Trainer(Net(), args, train_dataset=rows, flight_log=True)


"""


def train(home: Path, code: str) -> None:
    (home / "train.py").write_text(SCRIPT + code)
    subprocess.run([sys.executable, "train.py"], cwd=home, check=True, capture_output=True)


def test_a_script_that_changes_its_folder(tmp_path: Path) -> None:
    train(tmp_path, "os.mkdir('work'), os.chdir('work')\ntrainer_in('run').train()")
    shutil.rmtree(tmp_path / "work" / "run" / "checkpoint-10")
    (tmp_path / "train.py").write_text((tmp_path / "train.py").read_text().replace("os.mkdir('work'), ", ""))
    answer = show_replay(str(tmp_path / "work" / "run"), step=7, output=str(tmp_path / "a"))
    assert "from checkpoint-5" in answer[0]
    assert answer.data["parted"] is None


def test_a_script_without_arguments_leaves_its_run_alone(tmp_path: Path) -> None:
    train(tmp_path, "trainer = trainer_in(None)\ntrainer.args.max_steps = 4\ntrainer.train()")
    ledger = tmp_path / "tmp_trainer" / "flight" / "rank0.jsonl"
    before = ledger.read_text()
    assert show_replay(str(tmp_path / "tmp_trainer"), step=2, output=str(tmp_path / "a")).data["parted"] is None
    assert ledger.read_text() == before


def test_a_run_that_was_resumed_from_another_one(tmp_path: Path) -> None:
    train(tmp_path, "trainer_in('first').train()")
    train(tmp_path, "trainer_in('run', learning_rate=1e-2).train(resume_from_checkpoint='first/checkpoint-5')")
    for step, start in ((7, "checkpoint-5"), (11, "checkpoint-10")):
        answer = show_replay(str(tmp_path / "run"), step=step, output=str(tmp_path / str(step)))
        assert f"from {start}" in answer[0]
        assert answer.data["parted"] is None


def test_checkpoints_that_a_run_has_left_behind_are_not_used(tmp_path: Path) -> None:
    train(tmp_path, "trainer_in('run').train()")
    again = "trainer_in('run', save_steps=8, learning_rate=1e-2).train("
    train(tmp_path, f"{again}resume_from_checkpoint='run/checkpoint-5')")
    answer = show_replay(str(tmp_path / "run"), step=11, output=str(tmp_path / "a"))
    assert ("from checkpoint-8" in answer[0], answer.data["parted"]) == (True, None)
    train(tmp_path, f"{again})")
    for step, start in ((7, "the start"), (11, "checkpoint-8")):
        answer = show_replay(str(tmp_path / "run"), step=step, output=str(tmp_path / str(step)))
        assert (f"from {start}" in answer[0], answer.data["parted"]) == (True, None)


def test_a_step_of_the_second_training_of_a_script_is_told(tmp_path: Path) -> None:
    train(tmp_path, "trainer_in('first', max_steps=3).train()\ntrainer_in('run', ROWS[::-1]).train()")
    answer = show_replay(str(tmp_path / "run"), step=2, output=str(tmp_path / "a"))
    assert answer.data["parted"] == 1
    assert "by training number 2 of its script" in answer[1]
    with pytest.raises(ConfigError, match="training ended, or stopped writing, before step 4"):
        show_replay(str(tmp_path / "run"), step=4, output=str(tmp_path / "b"))
