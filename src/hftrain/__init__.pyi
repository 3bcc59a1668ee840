"""The public names and their homes: the only list of them, for type checkers and, by `core/lazy.py`, at runtime."""

from transformers.data.data_collator import DataCollatorForLanguageModeling as DataCollatorForLanguageModeling
from transformers.data.data_collator import DataCollatorForMultipleChoice as DataCollatorForMultipleChoice
from transformers.data.data_collator import (
    DataCollatorForPermutationLanguageModeling as DataCollatorForPermutationLanguageModeling,
)
from transformers.data.data_collator import DataCollatorForSeq2Seq as DataCollatorForSeq2Seq
from transformers.data.data_collator import DataCollatorForTokenClassification as DataCollatorForTokenClassification
from transformers.data.data_collator import DataCollatorWithFlattening as DataCollatorWithFlattening
from transformers.hf_argparser import HfArg as HfArg
from transformers.hf_argparser import HfArgumentParser as HfArgumentParser
from transformers.integrations.integration_utils import AzureMLCallback as AzureMLCallback
from transformers.integrations.integration_utils import CodeCarbonCallback as CodeCarbonCallback
from transformers.integrations.integration_utils import DagsHubCallback as DagsHubCallback
from transformers.integrations.integration_utils import FlyteCallback as FlyteCallback
from transformers.integrations.integration_utils import KubeflowCallback as KubeflowCallback
from transformers.integrations.integration_utils import NeptuneCallback as NeptuneCallback
from transformers.integrations.neftune import neftune_post_forward_hook as neftune_post_forward_hook
from transformers.optimization import Adafactor as Adafactor
from transformers.optimization import AdafactorSchedule as AdafactorSchedule
from transformers.optimization import GreedyLR as GreedyLR
from transformers.optimization import get_adafactor_schedule as get_adafactor_schedule
from transformers.optimization import get_constant_schedule as get_constant_schedule
from transformers.optimization import get_constant_schedule_with_warmup as get_constant_schedule_with_warmup
from transformers.optimization import get_cosine_schedule_with_warmup as get_cosine_schedule_with_warmup
from transformers.optimization import (
    get_cosine_with_hard_restarts_schedule_with_warmup as get_cosine_with_hard_restarts_schedule_with_warmup,
)
from transformers.optimization import (
    get_cosine_with_min_lr_schedule_with_warmup as get_cosine_with_min_lr_schedule_with_warmup,
)
from transformers.optimization import (
    get_cosine_with_min_lr_schedule_with_warmup_lr_rate as get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
)
from transformers.optimization import get_greedy_schedule as get_greedy_schedule
from transformers.optimization import get_inverse_sqrt_schedule as get_inverse_sqrt_schedule
from transformers.optimization import get_linear_schedule_with_warmup as get_linear_schedule_with_warmup
from transformers.optimization import (
    get_polynomial_decay_schedule_with_warmup as get_polynomial_decay_schedule_with_warmup,
)
from transformers.optimization import get_reduce_on_plateau_schedule as get_reduce_on_plateau_schedule
from transformers.optimization import get_scheduler as get_scheduler
from transformers.optimization import get_wsd_schedule as get_wsd_schedule
from transformers.trainer_pt_utils import DistributedLengthGroupedSampler as DistributedLengthGroupedSampler
from transformers.trainer_pt_utils import IterableDatasetShard as IterableDatasetShard
from transformers.trainer_pt_utils import LengthGroupedSampler as LengthGroupedSampler
from transformers.trainer_pt_utils import distributed_concat as distributed_concat
from transformers.trainer_pt_utils import find_batch_size as find_batch_size
from transformers.trainer_pt_utils import get_length_grouped_indices as get_length_grouped_indices
from transformers.trainer_pt_utils import nested_concat as nested_concat
from transformers.trainer_pt_utils import nested_detach as nested_detach
from transformers.trainer_pt_utils import nested_gather as nested_gather
from transformers.trainer_pt_utils import nested_numpify as nested_numpify
from transformers.trainer_pt_utils import nested_truncate as nested_truncate
from transformers.trainer_pt_utils import torch_distributed_zero_first as torch_distributed_zero_first
from transformers.trainer_utils import denumpify_detensorize as denumpify_detensorize
from transformers.trainer_utils import find_executable_batch_size as find_executable_batch_size
from transformers.trainer_utils import is_main_process as is_main_process
from transformers.trainer_utils import number_of_arguments as number_of_arguments
from transformers.trainer_utils import seed_worker as seed_worker
from transformers.trainer_utils import speed_metrics as speed_metrics
from transformers.trainer_utils import total_processes_number as total_processes_number
from transformers.utils.notebook import NotebookProgressCallback as NotebookProgressCallback

from hftrain import loggers as loggers
from hftrain import loops as loops
from hftrain import strategies as strategies
from hftrain.arguments.enums import DebugOption as DebugOption
from hftrain.arguments.enums import FSDPOption as FSDPOption
from hftrain.arguments.enums import HubStrategy as HubStrategy
from hftrain.arguments.enums import IntervalStrategy as IntervalStrategy
from hftrain.arguments.enums import OptimizerNames as OptimizerNames
from hftrain.arguments.enums import ParallelMode as ParallelMode
from hftrain.arguments.enums import SaveStrategy as SaveStrategy
from hftrain.arguments.enums import SchedulerType as SchedulerType
from hftrain.arguments.processes import AcceleratorConfig as AcceleratorConfig
from hftrain.arguments.training import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
from hftrain.arguments.training import TrainingArguments as TrainingArguments
from hftrain.callbacks import CallbackHandler as CallbackHandler
from hftrain.callbacks import DefaultFlowCallback as DefaultFlowCallback
from hftrain.callbacks import ExportableState as ExportableState
from hftrain.callbacks import PrinterCallback as PrinterCallback
from hftrain.callbacks import TrainerCallback as TrainerCallback
from hftrain.callbacks.logging import RunLogger as RunLogger
from hftrain.checkpoint.manifest import PREFIX_CHECKPOINT_DIR as PREFIX_CHECKPOINT_DIR
from hftrain.checkpoint.manifest import get_last_checkpoint as get_last_checkpoint
from hftrain.checkpoint.writer import SavePolicy as SavePolicy
from hftrain.core.errors import CheckpointError as CheckpointError
from hftrain.core.errors import ConfigError as ConfigError
from hftrain.core.errors import HFTrainError as HFTrainError
from hftrain.core.errors import MissingDependencyError as MissingDependencyError
from hftrain.core.errors import NonFiniteError as NonFiniteError
from hftrain.core.errors import StrategyError as StrategyError
from hftrain.core.errors import TaskError as TaskError
from hftrain.core.seed import enable_full_determinism as enable_full_determinism
from hftrain.core.seed import set_seed as set_seed
from hftrain.core.state import TrainerControl as TrainerControl
from hftrain.core.state import TrainerState as TrainerState
from hftrain.core.types import BestRun as BestRun
from hftrain.core.types import EvalLoopOutput as EvalLoopOutput
from hftrain.core.types import EvalPrediction as EvalPrediction
from hftrain.core.types import HPSearchBackend as HPSearchBackend
from hftrain.core.types import PredictionOutput as PredictionOutput
from hftrain.core.types import StepOutput as StepOutput
from hftrain.core.types import TrainOutput as TrainOutput
from hftrain.data.collators import DataCollatorWithPadding as DataCollatorWithPadding
from hftrain.data.collators import DefaultDataCollator as DefaultDataCollator
from hftrain.data.collators import default_data_collator as default_data_collator
from hftrain.data.columns import RemoveColumnsCollator as RemoveColumnsCollator
from hftrain.data.datasets import EvalSet as EvalSet
from hftrain.data.datasets import has_length as has_length
from hftrain.engine.engine import Engine as Engine
from hftrain.extras.accumulation import GradientAccumulationScheduler as GradientAccumulationScheduler
from hftrain.extras.attaching import attach_weights as attach_weights
from hftrain.extras.averaging import EMA as EMA
from hftrain.extras.averaging import SWA as SWA
from hftrain.extras.batches import BatchCallback as BatchCallback
from hftrain.extras.chunked_loss import ChunkedCrossEntropy as ChunkedCrossEntropy
from hftrain.extras.chunked_loss import chunked_cross_entropy as chunked_cross_entropy
from hftrain.extras.clipping import GradientClipping as GradientClipping
from hftrain.extras.early_stopping import EarlyStoppingCallback as EarlyStoppingCallback
from hftrain.extras.engine_settings.deepspeed import HfDeepSpeedConfig as HfDeepSpeedConfig
from hftrain.extras.flight.ledger import FlightLog as FlightLog
from hftrain.extras.freezing import Freeze as Freeze
from hftrain.extras.mixture import Mixture as Mixture
from hftrain.extras.overflow import DebugUnderflowOverflow as DebugUnderflowOverflow
from hftrain.extras.packing.rows import pack_dataset as pack_dataset
from hftrain.extras.prediction_writer import PredictionWriter as PredictionWriter
from hftrain.extras.profiling.profiling import SimpleProfiler as SimpleProfiler
from hftrain.extras.profiling.profiling import TorchProfiler as TorchProfiler
from hftrain.extras.profiling.throughput import Throughput as Throughput
from hftrain.extras.profiling.throughput import parameter_table as parameter_table
from hftrain.extras.progress.bars import ProgressCallback as ProgressCallback
from hftrain.extras.progress.bars import SummaryCallback as SummaryCallback
from hftrain.extras.reports import metrics_format as metrics_format
from hftrain.extras.search.defaults import default_compute_objective as default_compute_objective
from hftrain.extras.search.defaults import default_hp_space_optuna as default_hp_space_optuna
from hftrain.extras.search.defaults import default_hp_space_ray as default_hp_space_ray
from hftrain.extras.search.defaults import default_hp_space_wandb as default_hp_space_wandb
from hftrain.extras.seq2seq.trainer import Seq2SeqTrainer as Seq2SeqTrainer
from hftrain.extras.spikes import SpikeGuard as SpikeGuard
from hftrain.extras.trackers.callbacks import ClearMLCallback as ClearMLCallback
from hftrain.extras.trackers.callbacks import CometCallback as CometCallback
from hftrain.extras.trackers.callbacks import DVCLiveCallback as DVCLiveCallback
from hftrain.extras.trackers.callbacks import MLflowCallback as MLflowCallback
from hftrain.extras.trackers.callbacks import SwanLabCallback as SwanLabCallback
from hftrain.extras.trackers.callbacks import TensorBoardCallback as TensorBoardCallback
from hftrain.extras.trackers.callbacks import TrackerCallback as TrackerCallback
from hftrain.extras.trackers.callbacks import TrackioCallback as TrackioCallback
from hftrain.extras.trackers.callbacks import WandbCallback as WandbCallback
from hftrain.loggers.base import Logger as Logger
from hftrain.loops.contract import Loop as Loop
from hftrain.loops.evaluate import EvaluateLoop as EvaluateLoop
from hftrain.loops.evaluate import EvaluateParts as EvaluateParts
from hftrain.loops.evaluate import PredictLoop as PredictLoop
from hftrain.loops.fit import FitLoop as FitLoop
from hftrain.loops.fit import FitParts as FitParts
from hftrain.optim.extras.muon import Muon as Muon
from hftrain.optim.groups import get_model_param_count as get_model_param_count
from hftrain.optim.groups import get_parameter_names as get_parameter_names
from hftrain.optim.layerwise import layerwise_groups as layerwise_groups
from hftrain.precision.base import Precision as Precision
from hftrain.precision.registry import precisions as precisions
from hftrain.strategies.base import Strategy as Strategy
from hftrain.strategies.launching import launch as launch
from hftrain.task.loss import LabelSmoother as LabelSmoother
from hftrain.task.model_task import ModelTask as ModelTask
from hftrain.task.module import TaskModule as TaskModule
from hftrain.trainer import Trainer as Trainer

__version__: str
