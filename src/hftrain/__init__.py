"""hftrain: modular PyTorch training that speaks the Hugging Face Trainer's language."""

from hftrain.arguments import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from hftrain.callbacks import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    NotebookProgressCallback,
    PredictionWriter,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)
from hftrain.callbacks.trackers import (
    AzureMLCallback,
    ClearMLCallback,
    CodeCarbonCallback,
    CometCallback,
    DagsHubCallback,
    DVCLiveCallback,
    FlyteCallback,
    MLflowCallback,
    NeptuneCallback,
    SwanLabCallback,
    TensorBoardCallback,
    TrackerCallback,
    TrackioCallback,
    WandbCallback,
)
from hftrain.cli import HfArgumentParser
from hftrain.core.errors import (
    CheckpointError,
    ConfigError,
    HFTrainError,
    MissingDependencyError,
    StrategyError,
    TaskError,
)
from hftrain.core.progress import TrainerControl
from hftrain.core.seed import enable_full_determinism, set_seed
from hftrain.core.state import TrainerState
from hftrain.core.types import EvalLoopOutput, EvalPrediction, PredictionOutput, StepOutput, TrainOutput
from hftrain.data.collators import DataCollatorWithPadding, DefaultDataCollator, default_data_collator
from hftrain.data.collators_packed import DataCollatorWithFlattening
from hftrain.data.collators_text import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
)
from hftrain.loggers.base import Logger
from hftrain.loggers.registry import loggers
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions
from hftrain.search.config import BestRun, HPSearchBackend
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import strategies
from hftrain.task import ModelTask, TaskModule
from hftrain.task.overflow import DebugUnderflowOverflow
from hftrain.trainer import Seq2SeqTrainer, Trainer
from hftrain.trainer.eval_sets import EvalSet

__version__ = "0.1.0"

__all__ = [
    "AzureMLCallback",
    "BestRun",
    "CheckpointError",
    "ClearMLCallback",
    "CodeCarbonCallback",
    "CometCallback",
    "ConfigError",
    "DVCLiveCallback",
    "DagsHubCallback",
    "DataCollatorForLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "DebugUnderflowOverflow",
    "DefaultDataCollator",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "EvalLoopOutput",
    "EvalPrediction",
    "EvalSet",
    "FlyteCallback",
    "HFTrainError",
    "HPSearchBackend",
    "HfArgumentParser",
    "HubStrategy",
    "IntervalStrategy",
    "Logger",
    "MLflowCallback",
    "MissingDependencyError",
    "ModelTask",
    "NeptuneCallback",
    "NotebookProgressCallback",
    "OptimizerNames",
    "Precision",
    "PredictionOutput",
    "PredictionWriter",
    "PrinterCallback",
    "ProgressCallback",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "StepOutput",
    "Strategy",
    "StrategyError",
    "SwanLabCallback",
    "TaskError",
    "TaskModule",
    "TensorBoardCallback",
    "TrackerCallback",
    "TrackioCallback",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "WandbCallback",
    "default_data_collator",
    "enable_full_determinism",
    "loggers",
    "precisions",
    "set_seed",
    "strategies",
]
