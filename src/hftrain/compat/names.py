"""Which names of transformers' modules hftrain has an object of its own for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

# A module of transformers, where hftrain has the same names, and the names. Only what the Trainer makes, calls or looks
# at is listed: transformers' collators, samplers and functions work with hftrain's Trainer as they are.
_NAMES = (
    ("transformers.trainer", "hftrain.trainer", "Trainer"),
    ("transformers.trainer_seq2seq", "hftrain.trainer", "Seq2SeqTrainer"),
    ("transformers.training_args", "hftrain.arguments", "OptimizerNames ParallelMode TrainingArguments"),
    ("transformers.training_args_seq2seq", "hftrain.arguments", "Seq2SeqTrainingArguments"),
    (
        "transformers.trainer_callback",
        "hftrain.callbacks",
        "CallbackHandler DefaultFlowCallback EarlyStoppingCallback ExportableState PrinterCallback ProgressCallback "
        "TrainerCallback",
    ),
    ("transformers.trainer_callback", "hftrain.core.progress", "TrainerControl"),
    ("transformers.trainer_callback", "hftrain.core.state", "TrainerState"),
    (
        "transformers.trainer_utils",
        "hftrain.core.types",
        "EvalLoopOutput EvalPrediction PredictionOutput TrainOutput",
    ),
    ("transformers.trainer_utils", "hftrain.arguments", "HubStrategy IntervalStrategy SaveStrategy SchedulerType"),
    ("transformers.trainer_utils", "hftrain.search.config", "BestRun HPSearchBackend"),
    (
        "transformers.integrations.integration_utils",
        "hftrain.callbacks.trackers",
        "AzureMLCallback ClearMLCallback CodeCarbonCallback CometCallback DagsHubCallback DVCLiveCallback "
        "FlyteCallback KubeflowCallback MLflowCallback SwanLabCallback TensorBoardCallback TrackioCallback "
        "WandbCallback",
    ),
    ("transformers.utils.notebook", "hftrain.callbacks", "NotebookProgressCallback"),
    ("transformers.hf_argparser", "hftrain.cli", "HfArgumentParser"),
)

TELLING = frozenset(
    (
        *("CallbackHandler", "Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer"),
        *("TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments"),
    )
)
"""What a client derives its classes from, or has its arguments and callbacks checked against.

A module that holds one of these of transformers' was imported too early to be served: it keeps transformers' training.
"""


def replacements() -> Iterator[tuple[str, Any, Any]]:
    """Import transformers' modules and yield a name, its object there and hftrain's; a name either lacks is left out.

    `transformers.utils.notebook` needs IPython, so that module may be absent.
    """
    for theirs, ours, names in _NAMES:
        try:
            module = importlib.import_module(theirs)
        except ImportError:
            if theirs != "transformers.utils.notebook":
                raise
            continue
        home = importlib.import_module(ours)
        for name in names.split():
            if hasattr(module, name) and hasattr(home, name):
                yield name, getattr(module, name), getattr(home, name)
