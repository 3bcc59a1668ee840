"""Images, texts and tables of callbacks in every tracker that takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.trackers import needs, train

_RUN = """
import json, sys
import torch
from hftrain import Trainer, TrainerCallback
from support.tiny import Net, make_arguments, make_rows


class Looks(TrainerCallback):
    def on_evaluate(self, args, state, control, logger, **kwargs):
        logger.log_image("look/picture", torch.arange(60).view(3, 4, 5) / 60)
        logger.log_text("look/text", "hello")
        logger.log_table("look/table", ["a", "b"], [[1, "x"], [2, "y"]])


options = {"trackio_space_id": None, **json.loads(sys.argv[1])}
args = make_arguments("out", num_train_epochs=1, eval_strategy="epoch", run_name="my run", **options)
rows = make_rows(8)
Trainer(Net(), args, train_dataset=rows, eval_dataset=rows, callbacks=[Looks]).train()
"""
OFFLINE = {
    "clearml": {"CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": "cache"},
    "comet_ml": {"COMET_MODE": "OFFLINE", "COMET_OFFLINE_DIRECTORY": "comet"},
    "swanlab": {"SWANLAB_MODE": "offline", "SWANLAB_LOG_DIR": "swan"},
    "trackio": {"TRACKIO_DIR": "trackio"},
    "wandb": {"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    "mlflow": {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"},
}


@pytest.mark.trackers
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(name)) for name in (*OFFLINE, "tensorboard", "dvclive")]
)
def test_tracker_takes_them(tmp_path: Path, name: str) -> None:
    printed = train(tmp_path, script=_RUN, report_to=name, env=OFFLINE.get(name))
    assert f"Tracker {name} failed" not in printed
    check = {"tensorboard": in_tensorboard, "mlflow": in_mlflow, "dvclive": in_dvclive, "wandb": in_wandb}.get(name)
    if check is not None:
        check(tmp_path)


def in_tensorboard(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (runs,) = (folder / "out" / "runs").iterdir()
    events: Any = EventAccumulator(str(runs))
    events.Reload()
    (image,) = events.Images("look/picture")
    assert (image.step, image.height, image.width) == (2, 4, 5)
    texts = {name: events.Tensors(f"look/{name}/text_summary")[0] for name in ("text", "table")}
    assert {name: event.step for name, event in texts.items()} == {"text": 2, "table": 2}
    assert texts["text"].tensor_proto.string_val[0] == b"hello"
    assert texts["table"].tensor_proto.string_val[0].splitlines() == [
        *(b"| a | b |", b"| --- | --- |", b"| 1 | x |", b"| 2 | y |")
    ]


def in_mlflow(folder: Path) -> None:
    names = {path.name for path in folder.rglob("artifacts/**/*") if path.is_file()}
    assert {"2.txt", "2.json"} <= names
    assert any("picture" in name and name.endswith(".png") for name in names)


def in_dvclive(folder: Path) -> None:
    assert [path.name for path in (folder / "dvclive").rglob("look/picture/*")] == ["2.png"]


def in_wandb(folder: Path) -> None:
    media = {path.suffix for path in folder.rglob("media/**/*") if path.is_file()}
    assert {".png", ".json"} <= media
