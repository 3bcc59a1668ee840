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
    gone={
        "neptune": (
            "Neptune closed its service in March 2026, and nothing receives what its package sends.",
            "Use another tracker, such as report_to='wandb', 'mlflow' or 'trackio'.",
        ),
    },
)
loggers.register("azure_ml", "hftrain.loggers.azure_ml:AzureMLLogger", summary="Azure Machine Learning")
loggers.register("clearml", "hftrain.loggers.clearml:ClearMLLogger", summary="ClearML")
loggers.register("codecarbon", "hftrain.loggers.codecarbon:CodeCarbonLogger", summary="CodeCarbon, emissions")
loggers.register("comet_ml", "hftrain.loggers.comet:CometLogger", summary="Comet")
loggers.register("dagshub", "hftrain.loggers.dagshub:DagsHubLogger", summary="MLflow on DagsHub")
loggers.register("dvclive", "hftrain.loggers.dvclive:DVCLiveLogger", summary="DVCLive")
loggers.register("flyte", "hftrain.loggers.flyte:FlyteLogger", summary="Flyte, inside a task")
loggers.register("kubeflow", "hftrain.loggers.kubeflow:KubeflowLogger", summary="a Kubeflow TrainJob's server")
loggers.register("mlflow", "hftrain.loggers.mlflow:MLflowLogger", summary="MLflow")
loggers.register("swanlab", "hftrain.loggers.swanlab:SwanLabLogger", summary="SwanLab")
loggers.register("tensorboard", "hftrain.loggers.tensorboard:TensorBoardLogger", summary="TensorBoard")
loggers.register("trackio", "hftrain.loggers.trackio:TrackioLogger", summary="Trackio")
loggers.register("wandb", "hftrain.loggers.wandb:WandbLogger", summary="Weights & Biases")


def available_loggers() -> list[str]:
    """List the trackers that ``report_to="all"`` means here: installed, switched on, and of use; imports no tracker.

    Those that other packages add report only where they are named.
    """
    kinds: dict[str, Any] = {name: loggers.resolve(name)[0] for name in loggers.names(with_entry_points=False)}
    found = {
        name: kind
        for name, kind in kinds.items()
        if not kind.missing_packages() and kind.why_off() is None and kind.joins_all()
    }
    replaced = {name for kind in found.values() for name in kind.replaces}
    return [name for name in found if name not in replaced]


def create_logger(name: str, /, *args: Any, **kwargs: Any) -> Logger:
    """Build a tracker's logger; nothing is started, and its package is not imported."""
    kind: Any = loggers.resolve(name)[0]
    missing = kind.missing_packages()
    if missing:
        raise MissingDependencyError(
            f"Tracker {name!r} was asked for.",
            f"It needs {' and '.join(missing)}, which cannot be imported.",
            f"Run: pip install 'hftrain[{name}]', or leave the tracker out of report_to.",
            report_to=name,
        )
    logger: Logger = kind(*args, **kwargs)
    return logger
