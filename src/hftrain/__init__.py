"""hftrain: modular PyTorch training that speaks the Hugging Face Trainer's language."""

from typing import TYPE_CHECKING

from hftrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from hftrain import loggers, loops, strategies
    from hftrain.adapter.zero3 import HfDeepSpeedConfig
    from hftrain.arguments import (
        AcceleratorConfig,
        DebugOption,
        FSDPOption,
        HubStrategy,
        IntervalStrategy,
        OptimizerNames,
        ParallelMode,
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
        KubeflowCallback,
        MLflowCallback,
        SwanLabCallback,
        TensorBoardCallback,
        TrackerCallback,
        TrackioCallback,
        WandbCallback,
    )
    from hftrain.checkpoint.layout import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
    from hftrain.checkpoint.policy import SavePolicy
    from hftrain.cli import HfArgumentParser
    from hftrain.cli.options import HfArg
    from hftrain.core.errors import (
        CheckpointError,
        ConfigError,
        HFTrainError,
        MissingDependencyError,
        StrategyError,
        TaskError,
    )
    from hftrain.core.nested import (
        denumpify_detensorize,
        distributed_concat,
        find_batch_size,
        nested_concat,
        nested_detach,
        nested_gather,
        nested_numpify,
        nested_truncate,
        torch_distributed_zero_first,
    )
    from hftrain.core.progress import TrainerControl
    from hftrain.core.seed import enable_full_determinism, set_seed
    from hftrain.core.state import TrainerState
    from hftrain.core.types import EvalLoopOutput, EvalPrediction, PredictionOutput, StepOutput, TrainOutput
    from hftrain.data.collators import DataCollatorWithPadding, DefaultDataCollator, default_data_collator
    from hftrain.data.collators_masked import (
        DataCollatorForMultipleChoice,
        DataCollatorForPermutationLanguageModeling,
        DataCollatorForWholeWordMask,
    )
    from hftrain.data.collators_packed import DataCollatorWithFlattening
    from hftrain.data.collators_text import (
        DataCollatorForLanguageModeling,
        DataCollatorForSeq2Seq,
        DataCollatorForTokenClassification,
    )
    from hftrain.data.documented import (
        DistributedLengthGroupedSampler,
        IterableDatasetShard,
        LengthGroupedSampler,
        RemoveColumnsCollator,
        SequentialDistributedSampler,
        get_length_grouped_indices,
        seed_worker,
    )
    from hftrain.data.sizes import has_length
    from hftrain.engine.engine import Engine
    from hftrain.loggers.base import Logger
    from hftrain.loops.contract import Loop
    from hftrain.loops.evaluate import EvaluateLoop, EvaluateParts
    from hftrain.loops.fit import FitLoop, FitParts
    from hftrain.loops.predict import PredictLoop
    from hftrain.optim.extras.adafactor import Adafactor, AdafactorSchedule, get_adafactor_schedule
    from hftrain.optim.functions import (
        get_constant_schedule,
        get_constant_schedule_with_warmup,
        get_cosine_schedule_with_warmup,
        get_cosine_with_hard_restarts_schedule_with_warmup,
        get_cosine_with_min_lr_schedule_with_warmup,
        get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
        get_greedy_schedule,
        get_inverse_sqrt_schedule,
        get_linear_schedule_with_warmup,
        get_polynomial_decay_schedule_with_warmup,
        get_reduce_on_plateau_schedule,
        get_scheduler,
        get_wsd_schedule,
    )
    from hftrain.optim.greedy import GreedyLR
    from hftrain.optim.groups import get_model_param_count, get_parameter_names
    from hftrain.precision.base import Precision
    from hftrain.precision.registry import precisions
    from hftrain.search.config import BestRun, HPSearchBackend
    from hftrain.search.defaults import (
        default_compute_objective,
        default_hp_space_optuna,
        default_hp_space_ray,
        default_hp_space_wandb,
    )
    from hftrain.strategies.base import Strategy
    from hftrain.strategies.launching import launch
    from hftrain.task import ModelTask, TaskModule
    from hftrain.task.loss import LabelSmoother
    from hftrain.task.overflow import DebugUnderflowOverflow
    from hftrain.trainer import Seq2SeqTrainer, Trainer
    from hftrain.trainer.eval_sets import EvalSet
    from hftrain.trainer.reports import metrics_format
    from hftrain.trainer.utilities import (
        find_executable_batch_size,
        is_main_process,
        neftune_post_forward_hook,
        number_of_arguments,
        speed_metrics,
        total_processes_number,
    )

# Imported when first asked for: `import hftrain` is to cost little more than `import torch`.
_HOMES = {
    "hftrain.adapter.zero3": "HfDeepSpeedConfig",
    "hftrain.arguments": (
        "AcceleratorConfig DebugOption FSDPOption HubStrategy IntervalStrategy OptimizerNames ParallelMode "
        "SaveStrategy SchedulerType Seq2SeqTrainingArguments TrainingArguments"
    ),
    "hftrain.callbacks": (
        "CallbackHandler DefaultFlowCallback EarlyStoppingCallback ExportableState NotebookProgressCallback "
        "PredictionWriter PrinterCallback ProgressCallback TrainerCallback"
    ),
    "hftrain.callbacks.trackers": (
        "AzureMLCallback ClearMLCallback CodeCarbonCallback CometCallback DagsHubCallback DVCLiveCallback "
        "FlyteCallback KubeflowCallback MLflowCallback SwanLabCallback TensorBoardCallback TrackerCallback "
        "TrackioCallback WandbCallback"
    ),
    "hftrain.checkpoint.layout": "PREFIX_CHECKPOINT_DIR get_last_checkpoint",
    "hftrain.checkpoint.policy": "SavePolicy",
    "hftrain.cli": "HfArgumentParser",
    "hftrain.cli.options": "HfArg",
    "hftrain.core.errors": "CheckpointError ConfigError HFTrainError MissingDependencyError StrategyError TaskError",
    "hftrain.core.nested": (
        "denumpify_detensorize distributed_concat find_batch_size nested_concat nested_detach nested_gather "
        "nested_numpify nested_truncate torch_distributed_zero_first"
    ),
    "hftrain.core.progress": "TrainerControl",
    "hftrain.core.seed": "enable_full_determinism set_seed",
    "hftrain.core.state": "TrainerState",
    "hftrain.core.types": "EvalLoopOutput EvalPrediction PredictionOutput StepOutput TrainOutput",
    "hftrain.data.collators": "DataCollatorWithPadding DefaultDataCollator default_data_collator",
    "hftrain.data.collators_masked": (
        "DataCollatorForMultipleChoice DataCollatorForPermutationLanguageModeling DataCollatorForWholeWordMask"
    ),
    "hftrain.data.collators_packed": "DataCollatorWithFlattening",
    "hftrain.data.collators_text": (
        "DataCollatorForLanguageModeling DataCollatorForSeq2Seq DataCollatorForTokenClassification"
    ),
    "hftrain.data.documented": (
        "DistributedLengthGroupedSampler IterableDatasetShard LengthGroupedSampler RemoveColumnsCollator "
        "SequentialDistributedSampler get_length_grouped_indices seed_worker"
    ),
    "hftrain.data.sizes": "has_length",
    "hftrain.engine.engine": "Engine",
    "hftrain.loggers.base": "Logger",
    "hftrain.loops.contract": "Loop",
    "hftrain.loops.evaluate": "EvaluateLoop EvaluateParts",
    "hftrain.loops.fit": "FitLoop FitParts",
    "hftrain.loops.predict": "PredictLoop",
    "hftrain.optim.extras.adafactor": "Adafactor AdafactorSchedule get_adafactor_schedule",
    "hftrain.optim.functions": (
        "get_constant_schedule get_constant_schedule_with_warmup get_cosine_schedule_with_warmup "
        "get_cosine_with_hard_restarts_schedule_with_warmup get_cosine_with_min_lr_schedule_with_warmup "
        "get_cosine_with_min_lr_schedule_with_warmup_lr_rate get_greedy_schedule get_inverse_sqrt_schedule "
        "get_linear_schedule_with_warmup get_polynomial_decay_schedule_with_warmup get_reduce_on_plateau_schedule "
        "get_scheduler get_wsd_schedule"
    ),
    "hftrain.optim.greedy": "GreedyLR",
    "hftrain.optim.groups": "get_model_param_count get_parameter_names",
    "hftrain.precision.base": "Precision",
    "hftrain.precision.registry": "precisions",
    "hftrain.search.config": "BestRun HPSearchBackend",
    "hftrain.search.defaults": (
        "default_compute_objective default_hp_space_optuna default_hp_space_ray default_hp_space_wandb"
    ),
    "hftrain.strategies.base": "Strategy",
    "hftrain.strategies.launching": "launch",
    "hftrain.task": "ModelTask TaskModule",
    "hftrain.task.loss": "LabelSmoother",
    "hftrain.task.overflow": "DebugUnderflowOverflow",
    "hftrain.trainer": "Seq2SeqTrainer Trainer",
    "hftrain.trainer.eval_sets": "EvalSet",
    "hftrain.trainer.reports": "metrics_format",
    "hftrain.trainer.utilities": (
        "find_executable_batch_size is_main_process neftune_post_forward_hook number_of_arguments speed_metrics "
        "total_processes_number"
    ),
}
__version__ = "0.1.0"

__all__ = [
    "PREFIX_CHECKPOINT_DIR",
    "AcceleratorConfig",
    "Adafactor",
    "AdafactorSchedule",
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
    "DataCollatorForMultipleChoice",
    "DataCollatorForPermutationLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorForWholeWordMask",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "DebugOption",
    "DebugUnderflowOverflow",
    "DefaultDataCollator",
    "DefaultFlowCallback",
    "DistributedLengthGroupedSampler",
    "EarlyStoppingCallback",
    "Engine",
    "EvalLoopOutput",
    "EvalPrediction",
    "EvalSet",
    "EvaluateLoop",
    "EvaluateParts",
    "ExportableState",
    "FSDPOption",
    "FitLoop",
    "FitParts",
    "FlyteCallback",
    "GreedyLR",
    "HFTrainError",
    "HPSearchBackend",
    "HfArg",
    "HfArgumentParser",
    "HfDeepSpeedConfig",
    "HubStrategy",
    "IntervalStrategy",
    "IterableDatasetShard",
    "KubeflowCallback",
    "LabelSmoother",
    "LengthGroupedSampler",
    "Logger",
    "Loop",
    "MLflowCallback",
    "MissingDependencyError",
    "ModelTask",
    "NotebookProgressCallback",
    "OptimizerNames",
    "ParallelMode",
    "Precision",
    "PredictLoop",
    "PredictionOutput",
    "PredictionWriter",
    "PrinterCallback",
    "ProgressCallback",
    "RemoveColumnsCollator",
    "SavePolicy",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "SequentialDistributedSampler",
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
    "default_compute_objective",
    "default_data_collator",
    "default_hp_space_optuna",
    "default_hp_space_ray",
    "default_hp_space_wandb",
    "denumpify_detensorize",
    "distributed_concat",
    "enable_full_determinism",
    "find_batch_size",
    "find_executable_batch_size",
    "get_adafactor_schedule",
    "get_constant_schedule",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_cosine_with_hard_restarts_schedule_with_warmup",
    "get_cosine_with_min_lr_schedule_with_warmup",
    "get_cosine_with_min_lr_schedule_with_warmup_lr_rate",
    "get_greedy_schedule",
    "get_inverse_sqrt_schedule",
    "get_last_checkpoint",
    "get_length_grouped_indices",
    "get_linear_schedule_with_warmup",
    "get_model_param_count",
    "get_parameter_names",
    "get_polynomial_decay_schedule_with_warmup",
    "get_reduce_on_plateau_schedule",
    "get_scheduler",
    "get_wsd_schedule",
    "has_length",
    "is_main_process",
    "launch",
    "loggers",
    "loops",
    "metrics_format",
    "neftune_post_forward_hook",
    "nested_concat",
    "nested_detach",
    "nested_gather",
    "nested_numpify",
    "nested_truncate",
    "number_of_arguments",
    "precisions",
    "seed_worker",
    "set_seed",
    "speed_metrics",
    "strategies",
    "torch_distributed_zero_first",
    "total_processes_number",
]

# `loggers`, `loops` and `strategies` are packages, and their functions are those of the registries: a name that hid its
# package would make `import hftrain.strategies.ddp as ddp` fail.
_SUBPACKAGES = ("loggers", "loops", "strategies")
__getattr__, __dir__ = lazy_names(
    __name__, {module: names.split() for module, names in _HOMES.items()}, subpackages=_SUBPACKAGES
)
