"""`hftrain replay` on scripts that move, train twice, resume from elsewhere, or whose models are of unusual kinds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked_python import ForkedPython

from hftrain import ConfigError
from hftrain.cli.replay import do_step_apart, show_replay
from hftrain.extras.flight.reading import first_parting, read_ledger

SCRIPT = """
import os, sys
import torch
from torch import nn
from hftrain import SpikeGuard, Trainer, TrainingArguments, set_seed

ROWS = [{"x": row[:4], "labels": row[4]} for row in torch.randn(40, 5, generator=torch.Generator().manual_seed(0))]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, x, labels):
        return {"loss": (self.layers(x).squeeze(1) - labels).square().mean()}


def trainer_in(folder, rows=ROWS, callbacks=None, **options):
    set_seed(0)
    options = {"max_steps": 12, "save_steps": 5, "report_to": "none", "disable_tqdm": True, **options}
    args = TrainingArguments(folder, per_device_train_batch_size=4, use_cpu=True, **options) if folder else None
    return Trainer(Net(), args, train_dataset=rows, flight_log=True, callbacks=callbacks)


"""


PYTHON = ForkedPython()


@pytest.fixture(scope="module", autouse=True)
def python() -> Iterator[None]:
    with PYTHON.replaying():
        yield


def train(home: Path, code: str) -> None:
    (home / "train.py").write_text(SCRIPT + code)
    PYTHON.run(["train.py"], home).check_returncode()


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


def test_looking_at_the_item_count_does_not_change_what_the_loss_is_taken_for(tmp_path: Path) -> None:
    code = """
class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, labels, **kwargs):
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


Net = Counted
rows = [{"x": row["x"], "labels": int(row["labels"] > 0)} for row in ROWS]
trainer_in("run", rows, gradient_accumulation_steps=2, max_steps=3).train()
"""
    train(tmp_path, code)
    for step in (1, 2):
        answer = show_replay(str(tmp_path / "run"), step=step, output=str(tmp_path / str(step)))
        assert answer.data["parted"] is None


def test_steps_of_which_some_went_back_to_a_checkpoint(tmp_path: Path) -> None:
    guard = "callbacks=[SpikeGuard('rewind', rolling_interval_length=4)]"
    rows = "[{**row, 'x': row['x'] * (100 if number in (3, 8) else 1)} for number, row in enumerate(ROWS)]"
    train(tmp_path, f"trainer_in('run', {rows}, save_steps=4, {guard}).train()")
    rewinds = (tmp_path / "run" / "journal.jsonl").read_text().count("spike_is_skipped")
    assert rewinds > 2
    for step in (10, 12):
        answer = show_replay(str(tmp_path / "run"), step=step, output=str(tmp_path / str(step)))
        assert answer.data["parted"] is None
        found = sorted(path.name for path in (tmp_path / str(step)).glob("checkpoint-*"))
        assert found == ["checkpoint-8"]  # a link; no other is saved
    assert (tmp_path / "run" / "checkpoint-8" / "model.safetensors").exists()


MODELS = {
    "sparse": """
        self.layer = nn.Embedding(8, 1, sparse=True)

    def forward(self, x, labels):
        y = self.layer(x.argmax(1)).squeeze(1)
""",
    "complex": """
        self.layer = nn.Linear(4, 1, dtype=torch.complex128)

    def forward(self, x, labels):
        y = self.layer(x + 0j * x.double()).abs().float().squeeze(1)
""",
    "compiled": """
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels):
        y = self.layer(x).squeeze(1)
""",
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_unusual_kinds(tmp_path: Path, kind: str) -> None:
    code = f"""
class Unusual(nn.Module):
    def __init__(self):
        super().__init__()
{MODELS[kind]}
        return {{"loss": (y - labels).square().mean(), "logits": y}}


Net = Unusual
options = {{"torch_compile": True, "torch_compile_backend": "aot_eager"}} if {kind == "compiled"} else {{}}
trainer_in("run", optim="sgd", max_grad_norm=0.0, save_safetensors=False, max_steps=3, **options).train()
"""
    train(tmp_path, code)
    do_step_apart(str(tmp_path / "run"), 2, tmp_path / "a")
    assert first_parting(read_ledger(tmp_path / "run"), read_ledger(tmp_path / "a"))[0] is None
    names = {call["module"] for call in json.loads((tmp_path / "a" / "modules-rank0.json").read_text())}
    assert {"(the model)", "layer.weight"} <= names
