"""Trackers by name."""

from __future__ import annotations

from typing import Any

from hftrain.core.errors import MissingDependencyError
from hftrain.core.registry import Registry
from hftrain.loggers.base import Logger

loggers: Registry[Logger] = Registry(
    "tracker",
    group="hftrain.loggers",
    elsewhere={"comet": "comet_ml", "tb": "tensorboard", "azureml": "azure_ml"},
)
_TABLE = """
    azure_ml     handed_on    AzureMLTracker     Azure Machine Learning
    clearml      accelerate   ClearMLLogger      ClearML
    codecarbon   handed_on    CodeCarbonTracker  CodeCarbon, emissions
    comet_ml     accelerate   CometLogger        Comet
    dagshub      handed_on    DagsHubTracker     MLflow on DagsHub
    dvclive      accelerate   DVCLiveLogger      DVCLive
    flyte        handed_on    FlyteTracker       Flyte, inside a task
    kubeflow     handed_on    KubeflowTracker    a Kubeflow TrainJob's server
    mlflow       mlflow       MLflowLogger       MLflow
    neptune      handed_on    NeptuneTracker     Neptune, on a server of your own
    swanlab      accelerate   SwanLabLogger      SwanLab
    tensorboard  tensorboard  TensorBoardLogger  TensorBoard
    trackio      trackio      TrackioLogger      Trackio
    wandb        wandb        WandbLogger        Weights & Biases
"""
for _row in _TABLE.strip().splitlines():
    _name, _home, _class, _summary = _row.split(maxsplit=3)
    loggers.register(_name, f"hftrain.loggers.{_home}:{_class}", summary=_summary)


def available_loggers() -> list[str]:
    """List the trackers of ``report_to="all"``: installed, enabled and applicable here; imports no tracker.

    Trackers added by other packages are used only if named.
    """
    classes: dict[str, Any] = {name: loggers.resolve(name)[0] for name in loggers.names(with_entry_points=False)}
    usable = {
        name: cls
        for name, cls in classes.items()
        if not cls.missing_packages() and cls.why_off() is None and cls.joins_all()
    }
    superseded = {name for cls in usable.values() for name in cls.replaces}
    return [name for name in usable if name not in superseded]


def installed_tracker(name: str) -> Any:
    """Return the class of a tracker."""
    cls: Any = loggers.resolve(name)[0]
    missing = cls.missing_packages()
    if missing:
        raise MissingDependencyError(
            f"Cannot report to tracker {name!r}:",
            f"it needs {' and '.join(missing)}, which cannot be imported.",
            f"Run: pip install 'hftrain[{name}]', or remove {name!r} from report_to.",
        )
    return cls


def create_logger(name: str, /, *args: Any, **kwargs: Any) -> Logger:
    """Create a tracker's logger; starts nothing and does not import its package."""
    logger: Logger = installed_tracker(name)(*args, **kwargs)
    return logger
