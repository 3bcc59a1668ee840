"""The documented settings: plain data, grouped by concern, checked on construction. Does not import torch."""

from hftrain.arguments.accelerator import AcceleratorConfig
from hftrain.arguments.enums import (
    DebugOption,
    EvaluationStrategy,
    FSDPOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
    ShardedDDPOption,
)
from hftrain.arguments.training import Seq2SeqTrainingArguments, TrainingArguments

__all__ = [
    "AcceleratorConfig",
    "DebugOption",
    "EvaluationStrategy",
    "FSDPOption",
    "HubStrategy",
    "IntervalStrategy",
    "OptimizerNames",
    "ParallelMode",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainingArguments",
    "ShardedDDPOption",
    "TrainingArguments",
]
