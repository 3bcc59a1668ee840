"""The public names of the package; see `hftrain/__init__.pyi`."""

from hftrain.loggers.accelerate import ClearMLLogger as ClearMLLogger
from hftrain.loggers.accelerate import CometLogger as CometLogger
from hftrain.loggers.accelerate import DVCLiveLogger as DVCLiveLogger
from hftrain.loggers.accelerate import SwanLabLogger as SwanLabLogger
from hftrain.loggers.base import Logger as Logger
from hftrain.loggers.base import RunFacts as RunFacts
from hftrain.loggers.base import numbers_of as numbers_of
from hftrain.loggers.base import regroup as regroup
from hftrain.loggers.mlflow import MLflowLogger as MLflowLogger
from hftrain.loggers.registry import available_loggers as available_loggers
from hftrain.loggers.registry import create_logger as create_logger
from hftrain.loggers.registry import loggers as loggers
from hftrain.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
from hftrain.loggers.trackio import TrackioLogger as TrackioLogger
from hftrain.loggers.wandb import WandbLogger as WandbLogger

register = loggers.register
names = loggers.names
summary = loggers.summary
resolve = loggers.resolve
create = loggers.create
