"""What an offline SwanLab run holds."""

from __future__ import annotations

import json
from pathlib import Path

from support.trackers import logged, needs, train

pytestmark = needs("swanlab")


def test_run_is_read_back(tmp_path: Path) -> None:
    env = {"SWANLAB_MODE": "offline", "SWANLAB_LOG_DIR": str(tmp_path / "swan"), "SWANLAB_PROJECT": "digits"}
    env |= {"SWANLAB_LOG_MODEL": "true"}
    printed = train(tmp_path, env=env, report_to="swanlab", save_strategy="epoch")
    (folder,) = (tmp_path / "swan").glob("run-*")
    (path,) = folder.glob("*.swanlab")
    data = path.read_bytes()
    for name in (b"train/loss", b"eval/loss", b"test/loss", b"digits", b"my run"):
        assert name in data, name
    settings = (folder / "files" / "config.yaml").read_text(encoding="utf-8")
    assert "learning_rate" in settings
    assert "hidden_size" in settings
    state = json.loads((tmp_path / "out/checkpoint-2/trainer_state.json").read_text(encoding="utf-8"))
    run_id = state["stateful_callbacks"]["SwanLabCallback"]["attributes"]["run_id"]
    assert path.name == f"run-{run_id}.swanlab"
    assert len(logged(tmp_path, "loss")) == 2
    assert "Tracker swanlab" not in printed
