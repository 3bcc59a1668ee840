"""The public names of the package; see `hftrain/__init__.pyi`."""

from hftrain.loggers.azure_ml import AzureMLLogger as AzureMLLogger
from hftrain.loggers.base import Logger as Logger
from hftrain.loggers.base import RunFacts as RunFacts
from hftrain.loggers.base import numbers_of as numbers_of
from hftrain.loggers.base import regroup as regroup
from hftrain.loggers.clearml import ClearMLLogger as ClearMLLogger
from hftrain.loggers.codecarbon import CodeCarbonLogger as CodeCarbonLogger
from hftrain.loggers.comet import CometLogger as CometLogger
from hftrain.loggers.dvclive import DVCLiveLogger as DVCLiveLogger
from hftrain.loggers.flyte import FlyteLogger as FlyteLogger
from hftrain.loggers.kubeflow import KubeflowLogger as KubeflowLogger
from hftrain.loggers.mlflow import DagsHubLogger as DagsHubLogger
from hftrain.loggers.mlflow import MLflowLogger as MLflowLogger
from hftrain.loggers.registry import available_loggers as available_loggers
from hftrain.loggers.registry import create_logger as create_logger
from hftrain.loggers.registry import loggers as loggers
from hftrain.loggers.swanlab import SwanLabLogger as SwanLabLogger
from hftrain.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
from hftrain.loggers.trackio import TrackioLogger as TrackioLogger
from hftrain.loggers.wandb import WandbLogger as WandbLogger

register = loggers.register
names = loggers.names
summary = loggers.summary
resolve = loggers.resolve
create = loggers.create
