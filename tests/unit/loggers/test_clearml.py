"""What an offline ClearML task holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.trackers import logged, needs, train

pytestmark = needs("clearml")


def test_run_is_read_back(tmp_path: Path) -> None:
    env = {"CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": str(tmp_path / "cache"), "CLEARML_LOG_MODEL": "true"}
    env |= {"CLEARML_PROJECT": "digits", "CLEARML_TASK": "first"}
    train(tmp_path, env=env, report_to="clearml", save_strategy="epoch")
    (folder,) = [path for path in (tmp_path / "cache").glob("offline/*") if path.is_dir()]
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [event for line in lines for event in json.loads(line)]
    losses = {
        stage: [
            (e["iter"], pytest.approx(e["value"])) for e in events if (e["metric"], e["variant"]) == ("loss", stage)
        ]
        for stage in ("train", "eval", "test")
    }
    assert losses["train"] == logged(tmp_path, "loss")
    assert losses["eval"] == logged(tmp_path, "eval_loss")
    assert len(losses["test"]) == 1
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    assert (task["name"], task["project_name"]) == ("first", "digits")
    assert task["hyperparams"]["Args"]["learning_rate"]["value"] == "0.01"
    assert "checkpoint-2" in json.dumps(task["execution"]["artifacts"])
