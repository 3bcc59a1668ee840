"""The names in transformers' modules for which hftrain has its own objects."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

# (module of transformers, module of hftrain, names). Only objects that the Trainer creates, calls or inspects:
# transformers' collators, samplers and functions work unchanged with hftrain's Trainer.
_NAMES = (
    ("transformers.trainer", "hftrain.trainer", "Trainer"),
    ("transformers.trainer_seq2seq", "hftrain.extras.seq2seq.trainer", "Seq2SeqTrainer"),
    ("transformers.training_args", "hftrain", "OptimizerNames ParallelMode TrainingArguments"),
    ("transformers.training_args_seq2seq", "hftrain", "Seq2SeqTrainingArguments"),
    (
        "transformers.trainer_callback",
        "hftrain.callbacks",
        "CallbackHandler DefaultFlowCallback ExportableState PrinterCallback TrainerCallback",
    ),
    ("transformers.trainer_callback", "hftrain", "EarlyStoppingCallback ProgressCallback"),
    ("transformers.trainer_callback", "hftrain.core.state", "TrainerControl"),
    ("transformers.trainer_callback", "hftrain.core.state", "TrainerState"),
    (
        "transformers.trainer_utils",
        "hftrain.core.types",
        "BestRun EvalLoopOutput EvalPrediction HPSearchBackend PredictionOutput TrainOutput",
    ),
    ("transformers.trainer_utils", "hftrain", "HubStrategy IntervalStrategy SaveStrategy SchedulerType"),
    (
        "transformers.integrations.integration_utils",
        "hftrain.extras.trackers.callbacks",
        "ClearMLCallback CometCallback DVCLiveCallback MLflowCallback SwanLabCallback TensorBoardCallback "
        "TrackioCallback WandbCallback",
    ),
)

TELLTALE_CLASSES = frozenset(
    (
        *("CallbackHandler", "Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer"),
        *("TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments"),
    )
)
"""Classes that libraries derive from, or check arguments and callbacks against.

A module that refers to transformers' version of one was imported before `install`, and would train with transformers.
"""


# Modules in which libraries replace names that transformers' Trainer uses; the first holds its default callbacks.
_WATCHED_MODULES = (
    *("transformers.trainer", "transformers.trainer_seq2seq", "transformers.trainer_utils"),
    *("transformers.trainer_callback", "transformers.trainer_pt_utils", "transformers.training_args"),
    *("transformers.integrations.integration_utils", "transformers.optimization"),
)


def watched_modules() -> list[ModuleType]:
    """Import the modules in which libraries replace names that transformers' Trainer uses."""
    return [importlib.import_module(name) for name in _WATCHED_MODULES]


def replacements() -> Iterator[tuple[str, Any, Any]]:
    """Import transformers' modules and yield each name that they have with its object there and in hftrain."""
    for theirs, ours, names in _NAMES:
        module, home = importlib.import_module(theirs), importlib.import_module(ours)
        for name in names.split():
            if hasattr(module, name):  # not all versions have all of them
                yield name, getattr(module, name), getattr(home, name)
