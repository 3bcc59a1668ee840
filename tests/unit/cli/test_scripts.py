"""A script is asked for something where it would train, as by `hftrain plan`, and does not train."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hftrain import ConfigError, Trainer
from hftrain.cli.commands import main
from hftrain.cli.scripts import at_training

SCRIPT = """
import sys
import torch
from hftrain import Trainer, TrainingArguments

class Net(torch.nn.Linear):
    def forward(self, x, labels):
        return (torch.nn.functional.mse_loss(super().forward(x), labels),)

rows = [{"x": torch.ones(int(sys.argv[1])), "labels": torch.ones(1)} for _ in range(8)]
args = TrainingArguments("out", use_cpu=True, report_to="none", disable_tqdm=True)
trainer = Trainer(Net(int(sys.argv[1]), 1), args, train_dataset=rows)
try:
    trainer.train()
except Exception:
    pass
print("trained")
"""


def test_script_is_run_up_to_its_training(tmp_cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("script.py").write_text(SCRIPT, encoding="utf-8")
    before = Trainer.train, list(sys.argv), list(sys.path)
    main(["estimate", "--json", "script.py", "1000"])
    shown, said = capsys.readouterr()
    sizes = json.loads(shown)
    assert sizes["parameters"] == sizes["gradients"] == 1001 * 4
    assert 2 * 1001 * 4 <= sizes["optimizer"] <= 2 * 1001 * 4 + 8  # AdamW's steps
    assert sizes.pop("peak") == sum(sizes.values())
    assert "trained" not in shown + said
    assert before == (Trainer.train, sys.argv, sys.path)
    assert not Path("out").exists()
    assert at_training("script.py", ["1000"], lambda trainer: trainer.num_examples(trainer.get_train_dataloader())) == 8


def test_script_without_a_training_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('nothing')\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"without a call of Trainer\.train"):
        at_training(tmp_path / "script.py", [], lambda trainer: None)


def test_script_that_cannot_be_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--gpus", "1", "absent.py"])
    assert "plan: Cannot run 'absent.py'. There is no such file." in capsys.readouterr().err
    (tmp_path / "loop.py").write_text("from hftrain import Engine\nengine = Engine()\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["prove", str(tmp_path / "loop.py")])
    assert "It trains in a loop of its own, with Engine: only Trainer.train() can be" in capsys.readouterr().err
