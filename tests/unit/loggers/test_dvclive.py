"""What DVCLive writes."""

from __future__ import annotations

import json
from pathlib import Path

from support.trackers import logged, needs, train

pytestmark = needs("dvclive")


def column(path: Path) -> list[tuple[int, float]]:
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    step, value = rows[0].index("step"), len(rows[0]) - 1
    return [(int(row[step]), float(row[value])) for row in rows[1:]]


def test_run_is_read_back_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    train(tmp_path, report_to="dvclive", save_strategy="epoch")
    plots = tmp_path / "dvclive" / "plots" / "metrics"
    assert column(plots / "train" / "loss.tsv") == logged(tmp_path, "loss")
    assert column(plots / "eval" / "loss.tsv") == logged(tmp_path, "eval_loss")
    assert "learning_rate: 0.01" in (tmp_path / "dvclive" / "params.yaml").read_text(encoding="utf-8")
    summary = json.loads((tmp_path / "dvclive" / "metrics.json").read_text(encoding="utf-8"))
    assert summary["test"]["loss"] == summary["eval"]["loss"]
    train(tmp_path, report_to="dvclive", num_train_epochs=2, resume="out/checkpoint-2")
    assert column(plots / "train" / "loss.tsv") == logged(tmp_path, "loss")


def test_model_is_recorded_in_dvc(tmp_path: Path) -> None:
    script = """
import subprocess, sys
for command in (["git", "init", "-q"], ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q",
                "--allow-empty", "-m", "x"], [sys.executable, "-m", "dvc", "init", "-q"]):
    subprocess.run(command, check=True)
from hftrain import DVCLiveCallback, Trainer
from support.tiny import Net, make_arguments, make_rows
args = make_arguments("out", save_strategy="epoch", num_train_epochs=1)
callback = DVCLiveCallback(save_dvc_exp=False)
Trainer(Net(), args, train_dataset=make_rows(8), callbacks=[callback]).train()
"""
    train(tmp_path, env={"HF_DVCLIVE_LOG_MODEL": "true"}, script=script)
    assert (tmp_path / "dvclive" / "artifacts" / "checkpoint-2" / "model.safetensors").exists()
