"""Experiment trackers: one per file, each told of a run and then of its metrics.

The package is the public name `hftrain.loggers`: it has the functions of the registry of trackers, such as `register`,
and their classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hftrain.core.lazy import lazy_names
from hftrain.loggers.base import Logger, RunFacts, numbers_of, regroup
from hftrain.loggers.registry import available_loggers, create_logger, loggers

if TYPE_CHECKING:
    from hftrain.loggers.azure_ml import AzureMLLogger
    from hftrain.loggers.clearml import ClearMLLogger
    from hftrain.loggers.codecarbon import CodeCarbonLogger
    from hftrain.loggers.comet import CometLogger
    from hftrain.loggers.dagshub import DagsHubLogger
    from hftrain.loggers.dvclive import DVCLiveLogger
    from hftrain.loggers.flyte import FlyteLogger
    from hftrain.loggers.kubeflow import KubeflowLogger
    from hftrain.loggers.mlflow import MLflowLogger
    from hftrain.loggers.swanlab import SwanLabLogger
    from hftrain.loggers.tensorboard import TensorBoardLogger
    from hftrain.loggers.trackio import TrackioLogger
    from hftrain.loggers.wandb import WandbLogger

_HOMES = {
    "hftrain.loggers.azure_ml": ("AzureMLLogger",),
    "hftrain.loggers.clearml": ("ClearMLLogger",),
    "hftrain.loggers.codecarbon": ("CodeCarbonLogger",),
    "hftrain.loggers.comet": ("CometLogger",),
    "hftrain.loggers.dagshub": ("DagsHubLogger",),
    "hftrain.loggers.dvclive": ("DVCLiveLogger",),
    "hftrain.loggers.flyte": ("FlyteLogger",),
    "hftrain.loggers.kubeflow": ("KubeflowLogger",),
    "hftrain.loggers.mlflow": ("MLflowLogger",),
    "hftrain.loggers.swanlab": ("SwanLabLogger",),
    "hftrain.loggers.tensorboard": ("TensorBoardLogger",),
    "hftrain.loggers.trackio": ("TrackioLogger",),
    "hftrain.loggers.wandb": ("WandbLogger",),
}

__all__ = [
    "AzureMLLogger",
    "ClearMLLogger",
    "CodeCarbonLogger",
    "CometLogger",
    "DVCLiveLogger",
    "DagsHubLogger",
    "FlyteLogger",
    "KubeflowLogger",
    "Logger",
    "MLflowLogger",
    "RunFacts",
    "SwanLabLogger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
    "available_loggers",
    "create",
    "create_logger",
    "loggers",
    "names",
    "numbers_of",
    "register",
    "regroup",
    "resolve",
    "summary",
]

register, names, summary = loggers.register, loggers.names, loggers.summary
resolve, create = loggers.resolve, loggers.create

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
