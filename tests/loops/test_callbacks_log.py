"""What callbacks log reaches the history, the journal and the trackers that take it, from the main process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import TaskError, Trainer, TrainerCallback
from hftrain.extras.trackers.choice import as_pixels
from hftrain.loggers import Logger


class Shows(Logger):
    name = "shows"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def log(self, metrics: Any, step: int) -> None:
        self.calls.append(("log", dict(metrics), step))

    def log_image(self, name: str, image: Any, step: int) -> None:
        self.calls.append(("image", name, image.shape, step))

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        self.calls.append(("table", name, columns, rows, step))


class Looks(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, logger: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            logger.log({"mine": torch.tensor(2.0)})
            logger.log_image("picture", torch.rand(3, 4, 5))
            logger.log_text("text", "hello")
            logger.log_table("table", ("a", "b"), [(1, "x")])


def train(folder: Path, *trackers: Any) -> Trainer:
    args = make_arguments(folder, max_steps=3, logging_strategy="no", save_strategy="steps", save_steps=1)
    trainer = Trainer(Net(), args, train_dataset=make_rows(16), callbacks=[Looks], loggers=list(trackers))
    with pytest.warns(UserWarning, match="Tracker shows has no log_text"):
        trainer.train()
    return trainer


def test_each_tracker_gets_what_it_takes(tmp_path: Path) -> None:
    tracker = Shows()
    trainer = train(tmp_path, tracker)
    assert tracker.calls[:3] == [
        ("log", {"train/mine": 2.0}, 2),
        ("image", "picture", (4, 5, 3), 2),
        ("table", "table", ["a", "b"], [[1, "x"]], 2),
    ]
    mine = [entry for entry in trainer.state.log_history if "mine" in entry]
    assert mine == [{"mine": 2.0, "epoch": trainer.state.log_history[0]["epoch"], "step": 2}]
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text("utf-8").splitlines() if line]
    assert [line["entry"]["mine"] for line in lines if "mine" in line.get("entry", {})] == [2.0]


def test_outside_of_callbacks_it_is_the_handlers(tmp_path: Path) -> None:
    tracker = Shows()
    trainer = train(tmp_path, tracker)
    trainer.callback_handler.logger.log_image("last", np.zeros((2, 2), dtype=np.uint8))
    assert tracker.calls[-1] == ("image", "last", (2, 2, 3), 3)


def test_other_processes_report_nothing(tmp_path: Path) -> None:
    tracker = Shows()
    trainer = train(tmp_path, tracker)
    tracker.calls.clear()
    trainer.state.is_world_process_zero = False
    trainer.callback_handler.logger.log({"a": 1.0})
    trainer.callback_handler.logger.log_image("last", "not looked at")
    assert tracker.calls == []


@pytest.mark.parametrize(
    ("image", "shape"),
    [
        (torch.rand(1, 4, 5), (4, 5, 3)),
        (torch.rand(4, 4, 5, dtype=torch.bfloat16, requires_grad=True), (4, 5, 4)),
        (np.zeros((4, 5)), (4, 5, 3)),
        (torch.zeros(3, 4, 5, dtype=torch.uint8), (4, 5, 3)),
    ],
)
def test_images_of_every_kind_become_bytes(image: Any, shape: tuple[int, ...]) -> None:
    pixels = as_pixels(image)
    assert (pixels.shape, pixels.dtype) == (shape, np.uint8)


def test_values_outside_are_clipped() -> None:
    assert as_pixels(torch.tensor([[-1.0, 0.5, 2.0, torch.nan]]))[..., 0].tolist() == [[0, 128, 255, 0]]
    assert as_pixels(np.array([[7, 200]], dtype=np.uint8))[..., 0].tolist() == [[7, 200]]


@pytest.mark.parametrize("shape", [(2,), (2, 3, 4, 5), (5, 4, 3)])
def test_axes_that_are_no_image_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(TaskError, match="Cannot log an image of shape"):
        as_pixels(torch.rand(shape))
