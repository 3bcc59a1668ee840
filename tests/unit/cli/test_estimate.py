"""`hftrain estimate`: a script is asked for its memory, and does not train."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hftrain import ConfigError, Trainer
from hftrain.cli.commands import main
from hftrain.cli.estimate import show_estimate

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


def test_script_is_run_up_to_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    before = Trainer.train, list(sys.argv), list(sys.path)
    main(["estimate", "script.py", "1000"])
    shown, said = capsys.readouterr()
    assert [line for line in said.splitlines() if not line.startswith("USDT")] == []  # which torch's profiler writes
    assert [line.split()[-1] in ("B", "kB") for line in shown.splitlines()] == [True] * 5
    assert "trained" not in shown
    assert before == (Trainer.train, sys.argv, sys.path)
    assert not (tmp_path / "out").exists()
    assert show_estimate("script.py", ["1000"]).data["parameters_bytes"] == 4 * 1001


def test_script_without_a_training_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('nothing')\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"without a call of Trainer\.train"):
        show_estimate(tmp_path / "script.py")


def test_script_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", "absent.py"])
    assert "estimate: Cannot run 'absent.py'. There is no such file." in capsys.readouterr().err
