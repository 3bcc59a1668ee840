"""Which trackers there are, and which of them are installed."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch

from hftrain.core import registry
from hftrain.core.errors import MissingDependencyError
from hftrain.loggers import base
from hftrain.loggers.base import Logger
from hftrain.loggers.registry import available_loggers, create_logger, loggers

NAMES_4_24 = {"azure_ml", "comet_ml", "mlflow", "neptune", "tensorboard", "wandb"}
NAMES_4_53 = NAMES_4_24 | {"clearml", "codecarbon", "dagshub", "dvclive", "flyte", "swanlab"}


def pretend(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(base, "_is_installed", lambda package: package in packages)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_DISABLED", "COMET_MODE", "DISABLE_MLFLOW_INTEGRATION", "MLFLOW_TRACKING_URI", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)


def test_every_documented_tracker_has_its_name() -> None:
    assert set(loggers.names()) == NAMES_4_53 | {"kubeflow", "trackio"}
    for name in loggers.names():
        assert loggers.resolve(name)[0].name == name
        assert loggers.summary(name)


def test_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "dagshub", "transformers")
    with pytest.raises(MissingDependencyError, match=r"it needs mlflow, .*pip install 'hftrain\[dagshub\]'"):
        create_logger("dagshub")


@pytest.mark.parametrize(
    ("variable", "value", "package", "name"),
    [
        ("WANDB_DISABLED", "true", "wandb", "wandb"),
        ("DISABLE_MLFLOW_INTEGRATION", "TRUE", "mlflow", "mlflow"),
        ("COMET_MODE", "disabled", "comet_ml", "comet_ml"),
        ("SWANLAB_MODE", "disabled", "swanlab", "swanlab"),
    ],
)
def test_variable_switches_a_tracker_off(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, package: str, name: str
) -> None:
    pretend(monkeypatch, package)
    assert available_loggers() == [name]
    monkeypatch.setenv(variable, value)
    assert available_loggers() == []
    assert variable in str(loggers.resolve(name)[0].why_off())


def test_codecarbon_is_off_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "codecarbon", "transformers")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert available_loggers() == []
    assert "ROCm" in loggers.resolve("codecarbon")[0].why_off()


def test_entry_points_add_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name="theirs", value="hftrain.loggers.base:Logger", group="hftrain.loggers")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "hftrain.loggers" else [])
    monkeypatch.setattr(loggers, "_entries", dict(loggers._entries))
    monkeypatch.setattr(loggers, "_has_entry_points", False)
    assert "theirs" in loggers.names()
    assert type(create_logger("theirs")) is Logger
    assert "theirs" not in available_loggers()
