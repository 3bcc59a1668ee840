"""Trackers through accelerate's classes, with a stand-in for SwanLab; the real packages have files of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.tiny import make_rows, train

from hftrain.loggers import base
from hftrain.loggers.accelerate import DVCLiveLogger
from hftrain.loggers.base import RunFacts


class Run:
    """An open run that remembers what it is told."""

    def __init__(self, **options: Any) -> None:
        self.id = "run-1"
        self.options = options
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.is_finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.is_finished = True


@pytest.mark.parametrize("is_open", [False, True])
def test_run_is_started_or_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool) -> None:
    runs = [Run()] if is_open else []

    class Config(dict[str, Any]):
        def update(self, values: Any, allow_val_change: bool = False) -> None:
            super().update(values)

    config = Config()
    module: Any = SimpleNamespace(
        config=config,
        has_run=lambda: bool(runs) and not runs[0].is_finished,
        get_run=lambda: runs[0],
        init=lambda **options: runs.append(Run(**options)) or runs[0],
        __spec__=object(),
    )
    monkeypatch.setitem(sys.modules, "swanlab", module)
    monkeypatch.setattr(base, "_is_installed", lambda package: package == "swanlab")
    monkeypatch.setenv("SWANLAB_PROJECT", "digits")
    trainer = train(tmp_path, train_dataset=make_rows(8), report_to="swanlab", run_name="mine")
    (run,) = runs
    assert [(step, row["train/loss"]) for step, row in run.rows if "train/loss" in row] == [
        (entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry
    ]
    assert config["learning_rate"] == 0.01
    assert run.options == ({} if is_open else {"project": "digits", "name": "mine", "log_dir": None})
    (callback,) = [each for each in trainer.callback_handler.callbacks if type(each).__name__ == "SwanLabCallback"]
    callback.close()
    assert run.is_finished is not is_open


def test_run_of_the_user_is_not_ended() -> None:
    own = Mock(dir="mine")
    logger = DVCLiveLogger(live=own)
    logger.start(RunFacts(name="x", hparams={"a": 1, "b": None}))
    logger.close()
    own.log_params.assert_called_once_with({"a": 1})
    assert (logger.run_id, own.end.called) == ("mine", False)
