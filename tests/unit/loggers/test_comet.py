"""What an offline Comet experiment holds."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from support.trackers import logged, needs, train

pytestmark = needs("comet_ml")


def test_run_is_read_back(tmp_path: Path) -> None:
    env = {"COMET_MODE": "OFFLINE", "COMET_OFFLINE_DIRECTORY": str(tmp_path / "comet"), "COMET_LOG_ASSETS": "true"}
    env |= {"COMET_PROJECT_NAME": "digits", "COMET_EXPERIMENT_KEY": "a" * 40}
    train(tmp_path, env=env, report_to="comet_ml", save_strategy="epoch")
    (path,) = (tmp_path / "comet").glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
        about = json.loads(archive.read("experiment.json"))
    assert (about["project_name"], about["offline_id"]) == ("digits", "a" * 40)
    payloads = [message["payload"] for message in messages]
    metrics = [each["metric"] for each in payloads if "metric" in each]
    found = [(each["step"], each["metricValue"]) for each in metrics if each["metricName"] == "train/loss"]
    assert found == logged(tmp_path, "loss")
    assert {"eval/loss", "test/loss"} <= {each["metricName"] for each in metrics}
    text = json.dumps(payloads)
    assert "args_learning_rate" in text
    assert "config_hidden_size" in text
    assert "model.safetensors" in text
