"""What an offline Neptune run holds; there is no service to send it to any more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.trackers import logged, needs, train

from hftrain import ConfigError, NeptuneCallback

pytestmark = needs("neptune")
OFFLINE = {"NEPTUNE_MODE": "offline", "NEPTUNE_PROJECT": "me/digits", "NEPTUNE_API_TOKEN": "eyJhcGlfYWRkcmVzcyI6IiJ9"}


def operations(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob(".neptune/offline/*/data-1.log")
    return [json.loads(line)["obj"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_run_is_read_back(tmp_path: Path) -> None:
    printed = train(tmp_path, env=OFFLINE, report_to="neptune", save_strategy="epoch")
    found = operations(tmp_path)
    losses = [
        (value["step"], value["value"])
        for each in found
        if "/".join(each["path"]) == "finetuning/train/loss"
        for value in each["values"]
    ]
    assert losses == logged(tmp_path, "loss")
    values = {"/".join(each["path"]): each.get("value") for each in found}
    assert values["finetuning/trainer_parameters/learning_rate"] == 0.01
    assert values["finetuning/model_config/hidden_size"] == 8
    assert values["sys/name"] == "my run"
    assert {"finetuning/eval/loss", "finetuning/test/loss"} <= values.keys()
    assert "Tracker neptune" not in printed


def test_resume_says_that_it_starts_a_new_run(tmp_path: Path) -> None:
    train(tmp_path, env=OFFLINE, report_to="neptune", save_strategy="steps", save_steps=1)
    printed = train(tmp_path, env=OFFLINE, report_to="neptune", resume="out/checkpoint-1")
    assert "Tracker neptune starts a new run for the resumed training." in printed


def test_checkpoints_to_upload_are_checked() -> None:
    assert NeptuneCallback(log_checkpoints="best").logger.artifacts == "end"
    with pytest.raises(ConfigError, match=r"log_checkpoints='bests' was given.*'best'"):
        NeptuneCallback(log_checkpoints="bests")
