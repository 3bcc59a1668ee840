"""Which trackers `report_to` and `loggers` mean."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments

import hftrain
from hftrain import Logger, Trainer
from hftrain.extras.trackers.callbacks import TensorBoardCallback, TrackerCallback, WandbCallback
from hftrain.extras.trackers.choice import tracker_callbacks, trackers_asked
from hftrain.loggers import base


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it seem that two trackers are installed; nothing in these tests starts one."""
    monkeypatch.delenv("WANDB_DISABLED", raising=False)
    monkeypatch.setattr("hftrain.extras.trackers.choice.available_loggers", lambda: ["tensorboard", "wandb"])
    monkeypatch.setattr(
        base, "_is_installed", lambda package: package in ("tensorboard", "wandb", "codecarbon", "transformers")
    )


@pytest.mark.parametrize(
    ("report_to", "names"),
    [
        ("none", []),
        ([], []),
        (["none"], []),
        ("all", ["tensorboard", "wandb"]),
        ("wandb", ["wandb"]),
        (["wandb", "tensorboard", "wandb"], ["wandb", "tensorboard"]),
        (["mlflow", "all"], ["mlflow", "tensorboard", "wandb"]),
    ],
)
def test_report_to_means_these(tmp_path: Path, report_to: Any, names: list[str]) -> None:
    assert trackers_asked(make_arguments(tmp_path, report_to=report_to)) == names


def test_report_to_not_given_means_all_and_names_them_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = make_arguments(tmp_path, report_to=None)
    with caplog.at_level(logging.INFO, logger="hftrain"):
        trainer = Trainer(Net(), args)  # a warning would be an error
    said = [record for record in caplog.records if "all installed trackers: tensorboard, wandb" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.INFO]
    assert args.report_to == ["tensorboard", "wandb"]
    kinds = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    assert kinds == ["DefaultFlowCallback", "TensorBoardCallback", "WandbCallback", "PrinterCallback"]
    trainer.remove_callback(TensorBoardCallback)
    assert isinstance(trainer.pop_callback(hftrain.WandbCallback), WandbCallback)
    assert len(trainer.callback_handler.callbacks) == 2


def test_codecarbon_on_rocm_is_dropped_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    args = make_arguments(tmp_path, report_to=["codecarbon", "tensorboard"])
    with pytest.warns(UserWarning, match="Cannot report to tracker 'codecarbon', because .*ROCm"):
        Trainer(Net(), args)
    assert args.report_to == ["tensorboard"]


def test_tracker_switched_off_by_its_variable_is_dropped_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_DISABLED", "true")
    with pytest.warns(UserWarning, match="Cannot report to tracker 'wandb', because WANDB_DISABLED is set"):
        assert trackers_asked(make_arguments(tmp_path, report_to="wandb")) == []


class Mine(Logger):
    """A tracker without a name in the registry."""

    name = "my_tracker"

    def log(self, metrics: Any, step: int) -> None:
        """Do nothing."""


def test_loggers_win_over_report_to(tmp_path: Path) -> None:
    own = Mine()
    trainer = Trainer(Net(), make_arguments(tmp_path, report_to="wandb"), loggers=[own, "tensorboard"])
    callbacks = trainer.callback_handler.callbacks[1:-1]
    assert [type(callback).__name__ for callback in callbacks] == ["MyTrackerCallback", "TensorBoardCallback"]
    assert callbacks[0].logger is own
    assert len(Trainer(Net(), make_arguments(tmp_path, report_to="wandb"), loggers=[]).callback_handler.callbacks) == 2
    one = Trainer(Net(), make_arguments(tmp_path), loggers="tensorboard").callback_handler.callbacks
    assert isinstance(one[1], TensorBoardCallback)


def test_callback_of_the_user_takes_the_place_of_the_tracker(tmp_path: Path) -> None:
    class Named(WandbCallback):
        pass

    args = make_arguments(tmp_path, report_to="all")
    callbacks = Trainer(Net(), args, callbacks=[TensorBoardCallback(), Named]).callback_handler.callbacks
    assert [type(callback).__name__ for callback in callbacks[1:-1]] == ["TensorBoardCallback", "Named"]
    assert tracker_callbacks(["wandb"], besides=[Named]) == []


def test_every_documented_callback_is_exported() -> None:
    names = "ClearML Comet DVCLive MLflow SwanLab TensorBoard Trackio Wandb"
    kinds = [getattr(hftrain, f"{name}Callback") for name in names.split()]
    assert all(issubclass(kind, TrackerCallback) for kind in kinds)
    handed_on = {"azure_ml", "codecarbon", "dagshub", "flyte", "kubeflow", "neptune"}
    assert {kind.tracker for kind in kinds} == set(hftrain.loggers.names()) - handed_on
