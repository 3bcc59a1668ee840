"""What a wandb run, kept offline, holds."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from support.trackers import logged, needs, train

from hftrain import ConfigError, WandbCallback

pytestmark = needs("wandb")
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}


def records(path: Path) -> list[Any]:
    """Read a .wandb file: a log in LevelDB's format, of blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, position, begun, found = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        part, position = data[position + 7 : position + 7 + length], position + 7 + length
        begun = part if kind in (1, 2) else begun + part
        if kind in (1, 4) and length:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(begun)
            found.append(record)
    return found


def items(entry: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in entry}


def history(found: list[Any], name: str) -> list[tuple[int, float]]:
    rows = [items(record.history.item) for record in found if record.WhichOneof("record_type") == "history"]
    return [(row["train/global_step"], row[name]) for row in rows if name in row]


def test_run_is_read_back_with_its_model(tmp_path: Path) -> None:
    env = {**OFFLINE, "WANDB_PROJECT": "mine", "WANDB_LOG_MODEL": "checkpoint", "WANDB_WATCH": "all"}
    printed = train(tmp_path, env=env, report_to="wandb", save_strategy="epoch", logging_steps=100)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = records(path)
    assert history(found, "eval/loss") == logged(tmp_path, "eval_loss")
    assert len(history(found, "test/loss")) == 1
    (run,) = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("mine", "my run")
    settings: dict[str, Any] = {}
    for record in found:
        if record.WhichOneof("record_type") == "config":
            settings.update(items(record.config.update))
    assert (settings["learning_rate"], settings["hidden_size"]) == (0.01, 8)
    state = json.loads((tmp_path / "out/checkpoint-2/trainer_state.json").read_text(encoding="utf-8"))
    assert state["stateful_callbacks"]["WandbCallback"]["attributes"] == {"run_id": run.run_id}
    # An offline run keeps no list of its uploads that could be read back: nothing may have failed.
    assert "Tracker wandb" not in printed


def test_run_of_the_user_is_joined_and_left_open(tmp_path: Path) -> None:
    script = """
import wandb
from hftrain import Trainer, WandbCallback
from support.tiny import Net, make_arguments, make_rows
mine = wandb.init(project="p")
trainer = Trainer(Net(), make_arguments("out", report_to="wandb"), train_dataset=make_rows(8))
trainer.train()
callback = trainer.pop_callback(WandbCallback)
callback.close()
assert wandb.run is mine and callback.run_id == mine.id
mine.log({"after": 1})
"""
    train(tmp_path, env=OFFLINE, script=script)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert len(history(records(path), "train/loss")) == 4


def test_resume_continues_the_run(tmp_path: Path) -> None:
    train(tmp_path, env=OFFLINE, report_to="wandb", save_strategy="steps", save_steps=1)
    train(tmp_path, env=OFFLINE, report_to="wandb", resume="out/checkpoint-1")
    ids = {path.name.rsplit("-", 1)[1] for path in tmp_path.glob("wandb/offline-run-*")}
    assert len(ids) == 1


@pytest.mark.parametrize(("name", "value"), [("WANDB_LOG_MODEL", "ends"), ("WANDB_WATCH", "gradient")])
def test_variable_with_an_unknown_value_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}='{value}' is set.*Did you mean '{value.rstrip('s')}"):
        WandbCallback()
