"""hftrain: modular PyTorch training that speaks the Hugging Face Trainer's language."""

from typing import TYPE_CHECKING

from hftrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from hftrain import loggers, strategies
    from hftrain.arguments import (
        AcceleratorConfig,
        HubStrategy,
        IntervalStrategy,
        OptimizerNames,
        SaveStrategy,
        SchedulerType,
        Seq2SeqTrainingArguments,
        TrainingArguments,
    )
    from hftrain.callbacks import (
        CallbackHandler,
        DefaultFlowCallback,
        EarlyStoppingCallback,
        ExportableState,
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
    from hftrain.checkpoint.policy import SavePolicy
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
    from hftrain.precision.base import Precision
    from hftrain.precision.registry import precisions
    from hftrain.search.config import BestRun, HPSearchBackend
    from hftrain.strategies.base import Strategy
    from hftrain.strategies.launching import launch
    from hftrain.task import ModelTask, TaskModule
    from hftrain.task.overflow import DebugUnderflowOverflow
    from hftrain.trainer import Seq2SeqTrainer, Trainer
    from hftrain.trainer.eval_sets import EvalSet

# Imported when first asked for: `import hftrain` is to cost little more than `import torch`.
_HOMES = {
    "hftrain.arguments": (
        "AcceleratorConfig",
        "HubStrategy",
        "IntervalStrategy",
        "OptimizerNames",
        "SaveStrategy",
        "SchedulerType",
        "Seq2SeqTrainingArguments",
        "TrainingArguments",
    ),
    "hftrain.callbacks": (
        "CallbackHandler",
        "DefaultFlowCallback",
        "EarlyStoppingCallback",
        "ExportableState",
        "NotebookProgressCallback",
        "PredictionWriter",
        "PrinterCallback",
        "ProgressCallback",
        "TrainerCallback",
    ),
    "hftrain.callbacks.trackers": (
        "AzureMLCallback",
        "ClearMLCallback",
        "CodeCarbonCallback",
        "CometCallback",
        "DagsHubCallback",
        "DVCLiveCallback",
        "FlyteCallback",
        "MLflowCallback",
        "NeptuneCallback",
        "SwanLabCallback",
        "TensorBoardCallback",
        "TrackerCallback",
        "TrackioCallback",
        "WandbCallback",
    ),
    "hftrain.checkpoint.policy": ("SavePolicy",),
    "hftrain.cli": ("HfArgumentParser",),
    "hftrain.core.errors": (
        "CheckpointError",
        "ConfigError",
        "HFTrainError",
        "MissingDependencyError",
        "StrategyError",
        "TaskError",
    ),
    "hftrain.core.progress": ("TrainerControl",),
    "hftrain.core.seed": (
        "enable_full_determinism",
        "set_seed",
    ),
    "hftrain.core.state": ("TrainerState",),
    "hftrain.core.types": (
        "EvalLoopOutput",
        "EvalPrediction",
        "PredictionOutput",
        "StepOutput",
        "TrainOutput",
    ),
    "hftrain.data.collators": (
        "DataCollatorWithPadding",
        "DefaultDataCollator",
        "default_data_collator",
    ),
    "hftrain.data.collators_packed": ("DataCollatorWithFlattening",),
    "hftrain.data.collators_text": (
        "DataCollatorForLanguageModeling",
        "DataCollatorForSeq2Seq",
        "DataCollatorForTokenClassification",
    ),
    "hftrain.loggers.base": ("Logger",),
    "hftrain.precision.base": ("Precision",),
    "hftrain.precision.registry": ("precisions",),
    "hftrain.search.config": (
        "BestRun",
        "HPSearchBackend",
    ),
    "hftrain.strategies.base": ("Strategy",),
    "hftrain.strategies.launching": ("launch",),
    "hftrain.task": (
        "ModelTask",
        "TaskModule",
    ),
    "hftrain.task.overflow": ("DebugUnderflowOverflow",),
    "hftrain.trainer": (
        "Seq2SeqTrainer",
        "Trainer",
    ),
    "hftrain.trainer.eval_sets": ("EvalSet",),
}
__version__ = "0.1.0"

__all__ = [
    "AcceleratorConfig",
    "AzureMLCallback",
    "BestRun",
    "CallbackHandler",
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
    "ExportableState",
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
    "SavePolicy",
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
    "launch",
    "loggers",
    "precisions",
    "set_seed",
    "strategies",
]

# `loggers` and `strategies` are packages, and their functions are those of the registries: a name that hid its package
# would make `import hftrain.strategies.ddp as ddp` fail.
__getattr__, __dir__ = lazy_names(__name__, _HOMES, subpackages=("loggers", "strategies"))
