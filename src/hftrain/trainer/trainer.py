"""The documented Trainer: methods that delegate, and hooks that the loops call through the instance."""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.data import IterableDataset, SequentialSampler

from hftrain.adapter.compilation import compile_config
from hftrain.adapter.data import eval_loader_config, length_config, total_batch_size, train_loader_config
from hftrain.adapter.deepspeed import settle_deepspeed
from hftrain.adapter.evaluate import evaluate_config, full_eval_dtype
from hftrain.adapter.launching import check_local_rank
from hftrain.adapter.loggers import tracker_callbacks, trackers_asked
from hftrain.adapter.optim import optimizer_config, schedule_config
from hftrain.adapter.plan import train_plan
from hftrain.adapter.precision import check_half_precision_backend, precision_request
from hftrain.adapter.sharing import check_configured_state, non_blocking_copies, settle_sharing
from hftrain.adapter.strategy import strategy_request
from hftrain.arguments.settle import settle
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks import CallbackHandler, DefaultFlowCallback, TrainerCallback, progress_callback
from hftrain.callbacks.checks import as_list
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.policy import SavePolicy
from hftrain.core.errors import ConfigError, TaskError, suggest
from hftrain.core.log import get_logger, get_verbosity, set_verbosity, sharing_verbosity, warn_once
from hftrain.core.progress import Progress, TrainerControl
from hftrain.core.seed import enable_full_determinism, preserved_rng, set_seed
from hftrain.core.state import TrainerState
from hftrain.core.tree import map_tensors
from hftrain.core.types import EvalLoopOutput, PredictionOutput, StepOutput, TrainOutput
from hftrain.data.collators import DataCollatorWithPadding, default_data_collator, makes_tensors
from hftrain.data.columns import ColumnPruner, TextRemover, known_columns, prune_columns, signature_columns
from hftrain.data.dispatch import takes_turns
from hftrain.data.grouping import LengthConfig, check_lengths, length_sampler, reading_order
from hftrain.data.loaders import build_eval_loader, build_train_loader, default_train_sampler
from hftrain.data.persistent import LoaderCache
from hftrain.data.sharding import shard_loader
from hftrain.data.sizes import expected_samples, has_length, num_examples
from hftrain.loggers.base import Logger
from hftrain.loops.contract import Loop, check_features
from hftrain.loops.evaluate import EvaluateHooks, EvaluateLoop, EvaluateParts
from hftrain.loops.predict import PredictLoop
from hftrain.loops.registry import create_loops
from hftrain.loops.window import LossWindow
from hftrain.optim.groups import decay_parameter_names
from hftrain.optim.optimizers import optimizer_class, optimizer_from_class
from hftrain.optim.schedules import build_schedule
from hftrain.optim.weight_modes import evaluation_weights
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions
from hftrain.search.config import BestRun, HPSearchBackend, choose_backend
from hftrain.step.in_backward import check_in_backward
from hftrain.step.legality import check_legal
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import create_strategy
from hftrain.task.compilation import Compiler
from hftrain.task.introspect import is_recomputing
from hftrain.task.loss import LabelSmoother
from hftrain.task.metric_state import read_metrics, warn_of_unread, warn_of_unreported
from hftrain.task.model_task import CountItems, ModelTask
from hftrain.task.modes import TrainingMode, is_on
from hftrain.task.module import TaskModule, as_step_output
from hftrain.task.noise import add_noise, find_embeddings
from hftrain.trainer.acceleration import adopt_accelerator, has_engine, make_accelerator, tell_sync
from hftrain.trainer.announce import announce_evaluation
from hftrain.trainer.best import follow_metric
from hftrain.trainer.capture import saved_tool, task_state, write_model
from hftrain.trainer.casting import ModelCasting, is_cast_inside, to_float32
from hftrain.trainer.checks import (
    check_arguments,
    check_eval_data,
    check_model,
    check_optimizer,
    check_parts,
    check_save_policy,
    check_sharding,
    check_step,
    check_strategy,
    check_tensor_parallel,
    check_train_data,
    check_unused_by_task,
    read_optimizers,
)
from hftrain.trainer.computing import Computing
from hftrain.trainer.counting import count_tokens, token_counter
from hftrain.trainer.datasets import check_kind, check_loader, check_one_set
from hftrain.trainer.debugging import debug_callbacks
from hftrain.trainer.engines import check_made
from hftrain.trainer.estimating import MemoryEstimate, estimate_memory
from hftrain.trainer.eval_sets import EvalSet, check_cadences, is_due, split_eval_sets
from hftrain.trainer.evaluating import (
    JitModel,
    cast_inputs,
    cast_weights,
    check_evaluating,
    read_memory,
    trace_model,
    with_memory,
)
from hftrain.trainer.fitting import SMALLER_BATCH, check_fitting, with_smaller_batches
from hftrain.trainer.foresight import Given, check_ahead, check_fits
from hftrain.trainer.generating import align_special_tokens, generates
from hftrain.trainer.hooks import call_with, check_hooks, in_context, missing_attribute
from hftrain.trainer.hub import TrainerHub
from hftrain.trainer.instep import InStep, check_turns
from hftrain.trainer.keywords import refusing_unknown
from hftrain.trainer.loop_parts import used_in_evaluation, used_in_training
from hftrain.trainer.means import MeanSearch
from hftrain.trainer.memory import MemoryTracker, measuring_init
from hftrain.trainer.mistakes import explain_mistake
from hftrain.trainer.nodes import check_nodes
from hftrain.trainer.numerics import check_training, prepare_model
from hftrain.trainer.output import Output, check_output
from hftrain.trainer.placement import is_spread, tensor_parallel_size
from hftrain.trainer.rehearsal import cut_short, existing_part, number_of_batches, rehearse, without_trackers
from hftrain.trainer.replicas import forget_devices, note_devices
from hftrain.trainer.reports import (
    metrics_format,
    metrics_table,
    speed_metrics,
    store_metrics,
    to_plain,
    with_prefix,
)
from hftrain.trainer.resuming import RunPlan, find_geometry, find_resume, plan_run
from hftrain.trainer.saving import load_task
from hftrain.trainer.searching import TrialRun, check_search, search, trying
from hftrain.trainer.session import TrainSession
from hftrain.trainer.setup import place_task
from hftrain.trainer.signatures import accepts, takes_trial, taking
from hftrain.trainer.tasks import check_not_lightning, check_task
from hftrain.trainer.weighing import LossHooks, LossShares
from hftrain.trainer.whereabouts import report_late_ranks, whereabouts
from hftrain.trainer.writing import make_manager, saves_at_all

logger = get_logger(__name__)


class Trainer:
    """Train, evaluate and predict with a `TaskModule` or any model, by the documented Hugging Face Trainer's surface.

    Nothing is launched and no device is touched before `train`, `evaluate` or `predict` is called.

    Args:
        model: A `TaskModule`, or an `nn.Module` that returns its loss (first in a tuple, or under ``"loss"``).
        args: The documented arguments; None writes to ``tmp_trainer``.
        data_collator: Makes a batch of samples; by default pads with `processing_class` if it can, else stacks.
        train_dataset: What to train on; may be an iterable without length (then set `max_steps`).
        eval_dataset: What to evaluate on; a dict holds several sets, each with metrics of its own name. Its values are
            datasets, or `EvalSet` objects where a set has metrics or a cadence of its own.
        processing_class: Tokenizer or processor; pads batches and is saved with the model.
        model_init: Builds a new model at each `train()`.
        compute_loss_func: ``f(outputs, labels, num_items_in_batch=...)`` in place of the model's own loss.
        compute_metrics: ``f(EvalPrediction) -> dict``.
        callbacks: Instances or classes, added to the default ones.
        optimizers: An optimizer and a schedule to use instead of the arguments' (either may be None).
        optimizer_cls_and_kwargs: A class and its arguments, in place of `args.optim`.
        preprocess_logits_for_metrics: ``f(logits, labels) -> logits``, run before predictions are kept.
        strategy: A strategy's name or an instance; wins over the arguments, which must not contradict it.
        precision: A precision's name or an instance; likewise.
        loop: What trains, evaluates or predicts in place of hftrain's own loop: a name, a class derived from `FitLoop`,
            `EvaluateLoop` or `PredictLoop`, or an instance; or a sequence of those, one per stage.
        spill_dir: A folder for predictions larger than memory: what an evaluation or `predict` keeps is held in unnamed
            files there, mapped into memory as NumPy arrays. A file's space is free again when its array is gone.
        save_policy: When and how to save beyond what the arguments say.
        fast_dev_run: Rehearse: `train` takes so many steps with a copy of the model, evaluates, saves and resumes in a
            temporary folder, logs how long a step took, and leaves nothing behind; `evaluate` and `predict` take so
            many batches. Callbacks are called as usual; trackers and the Hub are not. None for a real run, True for one
            batch.
        count_items: What a plain model's loss is a mean over, where it is not to be found out: ``"labels"``,
            ``"shifted_labels"``, ``"samples"``, ``"sum"``, or a function that counts a batch's items. Batches of one
            sample each, of unequal length, do not tell, and a loss of your own is not tried.
        loggers: Names of trackers, or `Logger` instances, in place of `args.report_to`.
        tokenizer: The older name of `processing_class`.
        callback: The older guide's name of `callbacks`.

    Raises:
        ConfigError: A setting is unknown, or contradicts another, or cannot act here.
        TaskError: The task does not keep its side of the contract.

    Source: the documented `Trainer`.
    """

    @measuring_init
    @refusing_unknown
    def __init__(
        self,
        model: TaskModule | nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        strategy: str | Strategy | None = None,
        precision: str | Precision | None = None,
        loop: str | Loop[Any] | type[Loop[Any]] | Sequence[Any] | None = None,
        spill_dir: str | Path | None = None,
        save_policy: SavePolicy | None = None,
        fast_dev_run: bool | int | None = None,
        count_items: str | CountItems | None = None,
        loggers: str | Logger | Sequence[str | Logger] | None = None,
        tokenizer: Any = None,
        callback: Sequence[Any] | None = None,
    ) -> None:
        given = dict(vars(self))
        self.args, self.fast_dev_run = _settled(args), number_of_batches(fast_dev_run)
        check_model(model, model_init)
        check_parts(
            model_init=model_init,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            collator=data_collator,
        )
        self.loops = create_loops(loop)
        self._make_parts(model, strategy, precision)
        check_sharding(self.args, self.strategy, optimizers=optimizers)
        callbacks = self._with_trackers(loggers, [*as_list(callbacks), *as_list(callback)])
        self.save_policy = save_policy or SavePolicy()
        eval_dataset, self._eval_sets = split_eval_sets(eval_dataset)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.spill_dir = None if spill_dir is None else Path(spill_dir).absolute()
        self._check_eval_data()
        self.model_init, self.compute_loss_func, self.count_items = model_init, compute_loss_func, count_items
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.optimizer: torch.optim.Optimizer | None = optimizers[0]
        self.lr_scheduler: Any = optimizers[1]
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.processing_class = _one_of(processing_class, tokenizer, new="processing_class", old="tokenizer")
        self._start_idle()
        self._take_model(model)
        check_unused_by_task(self.args, self.task, compute_loss_func=compute_loss_func, count_items=count_items)
        self._check_evaluating()
        self.data_collator = data_collator or self._default_collator()
        self._resolve_hooks(given)
        self._make_callbacks([*debug_callbacks(self.args, self.strategy), *callbacks])

    # -- construction --------------------------------------------------------------------------------------------

    def _take_model(self, model: Any) -> None:
        """Build the model, if it is not given, from the seed, and adopt it."""
        if (self.args.log_level if self.args.should_log else self.args.log_level_replica) != "passive":
            set_verbosity(self.args.get_process_log_level())
        (enable_full_determinism if self.args.full_determinism else set_seed)(self.args.seed)
        self._adopt_model(self.call_model_init() if model is None else model)
        if self.optimizer is not None and self.model_init is None:
            check_optimizer(self.optimizer, self.lr_scheduler, self.model)

    def _check_eval_data(self) -> None:
        if not self._is_overridden("get_train_dataloader"):
            check_kind(self.train_dataset, "train_dataset")
        if not self._is_overridden("get_eval_dataloader"):
            sets = self.eval_dataset.values() if isinstance(self.eval_dataset, Mapping) else [self.eval_dataset]
            for dataset in sets:
                check_kind(dataset, "eval_dataset")
        check_save_policy(self.args, self.save_policy)
        check_cadences(self.args, self._eval_sets, eval_steps=self.args.eval_steps)
        has_own_loader = self._is_overridden("get_eval_dataloader")
        check_eval_data(self.args, self.eval_dataset, has_own_loader=has_own_loader)

    def _check_ahead(self) -> None:
        """Refuse a training that would fail late, see `check_ahead`."""

        def count_steps(loader: Any) -> int:
            total = self.get_total_train_batch_size(self.args)
            return self.set_initial_training_values(self.args, loader, total)[6]

        data = self.train_dataset, self.eval_dataset, self._eval_sets, self.data_collator, self.label_names
        functions = self.compute_metrics, self.preprocess_logits_for_metrics, self.compute_loss_func
        given = Given(*data, *functions, self.callback_handler.callbacks, self._is_overridden, count_steps)
        rate = (self.optimizer_cls_and_kwargs or (None, {}))[1].get("lr", self.args.learning_rate)
        optimizers = (self.optimizer, self.lr_scheduler)
        parts = self.args, self.strategy, self.task, self.model
        check_ahead(*parts, given, optimizers=optimizers, learning_rate=rate, spill_dir=self.spill_dir)

    def _check_data(self) -> None:
        """Refuse data that a training could not read as asked."""
        check_tensor_parallel(self.get_tp_size(), self.strategy, is_handled=self.is_deepspeed_enabled)
        if not self._is_overridden("get_train_dataloader"):
            check_train_data(self.args, self.train_dataset)
            self._check_columns(self.train_dataset, role="train_dataset")
            if not self._is_overridden("_get_train_sampler"):
                self._check_lengths(self.train_dataset, is_training=True)
        is_evaluated = self.args.eval_strategy != "no" and self.eval_dataset is not None
        if is_evaluated and not self._is_overridden("get_eval_dataloader"):
            is_dict = isinstance(self.eval_dataset, Mapping)
            for dataset in self.eval_dataset.values() if is_dict else [self.eval_dataset]:
                self._check_columns(dataset)
                if not self._is_overridden("_get_eval_sampler"):
                    self._check_lengths(dataset, is_training=False)

    def _check_evaluating(self) -> None:
        """Refuse evaluations that cannot run as asked, and metrics that never come."""
        args, task = self.args, self.task
        check_evaluating(args, strategy=self.strategy, task=task, spill_dir=self.spill_dir)
        if self._is_overridden("prediction_loop") and not args.use_legacy_prediction_loop:
            warn_once(f"{type(self).__name__}.prediction_loop is not called without use_legacy_prediction_loop=True.")
        if generates(args) and not self._is_overridden("prediction_step"):
            warn_once(f"predict_with_generate=True has no effect in {type(self).__name__}; use Seq2SeqTrainer.")
        own = next((entry.metrics for entry in self._eval_sets.values() if entry.metrics is not None), None)
        metrics = self.compute_metrics or own
        if args.prediction_loss_only and metrics is not None:
            warn_once("compute_metrics is never called with prediction_loss_only=True, which keeps no predictions.")

    def _make_parts(self, model: Any, strategy: str | Strategy | None, precision: str | Precision | None) -> None:
        """Choose strategy and precision and refuse what cannot work; nothing is launched."""
        is_checkpointing = self.args.gradient_checkpointing or is_recomputing(model)
        forget_devices(self.args, model)
        name, options = strategy_request(self.args, strategy, is_checkpointing=bool(is_checkpointing))
        precision_name, precision_options = precision_request(self.args, precision)
        self.strategy = strategy if isinstance(strategy, Strategy) else create_strategy(name, **options)
        self.precision = (
            precision if isinstance(precision, Precision) else precisions.create(precision_name, **precision_options)
        )
        note_devices(self.args, self.strategy)
        check_strategy(self.args, self.strategy)
        settle_deepspeed(self.args, self.strategy, self.precision)
        check_nodes(self.args, self.strategy)
        check_output(self.args)
        check_legal(self.strategy, self.precision)
        check_configured_state(self.args, self.strategy.planned_device)
        self.strategy.non_blocking = non_blocking_copies(self.args)
        self._memory = MemoryTracker(
            is_on=not self.args.skip_memory_metrics,
            is_main=self.strategy.is_main,
            device_type=self.strategy.device_type,
        )
        self._memory.start("init")
        check_half_precision_backend(self.args, self.strategy.device_type)
        check_fitting(self.args, self.strategy)
        self.compiler = Compiler(compile_config(self.args))
        self._computing = Computing(self.precision.backward, self.precision.autocast)
        self._casting = ModelCasting(self._computing)

    def _with_trackers(self, loggers: Any, callbacks: Sequence[Any]) -> list[Any]:
        """Put the callbacks of the trackers to report to before the user's; none is started."""
        trackers = trackers_asked(self.args, loggers)
        if loggers is None:
            self.args.report_to = [str(name) for name in trackers]
        callbacks = [*tracker_callbacks(trackers, besides=callbacks), *callbacks]
        return without_trackers(callbacks) if self.fast_dev_run else callbacks

    def _adopt_model(self, model: nn.Module) -> None:
        """Make `model` the one to train: a plain module becomes a `ModelTask`."""
        bare = self.strategy.unwrap(model)
        check_not_lightning(bare)
        if isinstance(bare, TaskModule):
            self.task: TaskModule = bare
            model = self.task.model if "model" in dict(bare.named_children()) else bare
        else:
            self.task = ModelTask(
                bare,
                label_names=self.args.label_names,
                label_smoothing=self.args.label_smoothing_factor,
                compute_loss_func=self.compute_loss_func,
                count_items=self.count_items,
            )
        check_task(self.task)
        self.model: nn.Module = self.strategy.unwrap(self.task.model)
        self.task.model = self.model
        # A wrapper that the user put around the model is what the forward pass goes through.
        self.model_wrapped: nn.Module = model
        self._outermost = model
        self.is_model_parallel = is_spread(self.model)
        self.strategy.place_model = bool(self.place_model_on_device)
        prepare_model(self.args, self.strategy, self.model, noise_alpha=self.neftune_noise_alpha)
        plain = self.task if isinstance(self.task, ModelTask) else None
        self._find("label_names", list(plain.label_names) if plain else ["labels"])
        self._find("can_return_loss", plain.can_return_loss if plain else False)
        self._find("model_accepts_loss_kwargs", plain.accepts_item_count if plain else False)
        self._find("_signature_columns", None)
        if self.optimizer is not None and self.model_init is None:
            check_optimizer(self.optimizer, self.lr_scheduler, self.model)

    def _find(self, name: str, value: Any) -> None:
        """Set what was found out about the model, unless a subclass has set a value of its own since."""
        if name not in vars(self) or vars(self)[name] == self._found.get(name):
            setattr(self, name, value)
            self._found[name] = value

    def _default_collator(self) -> Callable[[list[Any]], Any]:
        tool = self.processing_class
        pads = hasattr(tool, "pad") and (hasattr(tool, "pad_token_id") or hasattr(tool, "padding_value"))
        return DataCollatorWithPadding(tool) if pads else default_data_collator

    def _resolve_hooks(self, given: Mapping[str, Any]) -> None:
        """Look at the hooks' signatures once, so that overrides in the older forms keep working."""
        # Under names that no subclass would choose for a method of its own.
        self._slot_compute_loss = taking(self.compute_loss, 3, "num_items_in_batch")
        self._loss_takes_count = accepts(self.compute_loss, "num_items_in_batch")
        self._slot_training_step = taking(self.training_step, 2, "num_items_in_batch")
        if self._is_overridden("_prepare_context_parallel_inputs"):
            self._slot_training_step = in_context(self._prepare_context_parallel_inputs, self._slot_training_step)
        self._slot_get_batch_samples = taking(self.get_batch_samples, 2, "device")
        self._slot_log = taking(self.log, 1, "start_time")
        self._walks_inputs = self._is_overridden("_prepare_input")
        self._counts_items_itself = self._is_overridden("_get_num_items_in_batch")
        self._makes_contexts = any(
            map(self._is_overridden, ("autocast_smart_context_manager", "torchdynamo_smart_context_manager"))
        )
        self._shares = self._make_shares()
        # A step of the user's own, which may call compute_loss itself.
        self._steps_itself, self._is_weighing = self._is_overridden("training_step"), False
        check_hooks(type(self), Trainer, given=given, attributes=vars(self))

    def _make_callbacks(self, callbacks: Sequence[Any]) -> None:
        if self.args.push_to_hub and not self.fast_dev_run:
            self.init_hf_repo()
        disables = self.args.disable_tqdm
        disables = get_verbosity() > 30 if disables is None else disables
        self.control = TrainerControl()
        self.state = self._new_state()
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback(), *callbacks, progress_callback(disable_tqdm=disables)],
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
            args=self.args,
            state=self.state,
            control=self.control,
        )
        self.callback_handler.fire("on_init_end")

    def _new_state(self) -> TrainerState:
        return TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )

    def _is_overridden(self, name: str) -> bool:
        return name in vars(self) or getattr(type(self), name) is not getattr(Trainer, name)

    if not TYPE_CHECKING:
        # Hidden from type checkers, for which every attribute would exist.
        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property raised an AttributeError of its own: let it speak.
                return object.__getattribute__(self, name)
            raise AttributeError(missing_attribute(type(self), name))

    def _start_idle(self) -> None:
        """Set what only a running verb changes."""
        self._output = Output(lambda: self.args.output_dir, self.strategy)
        self._hub = TrainerHub(
            args=self.args,
            output=self._output,
            strategy=self.strategy,
            read_model=lambda: self.model,
            fire=lambda event: self.callback_handler.fire(event),
            create_model_card=lambda **card: self.create_model_card(**card),
            save_model=lambda: self.save_model(_internal_call=True),
        )
        self.is_in_train = False
        # The backend of a search, while one goes on.
        self.hp_search_backend: HPSearchBackend | None = None
        # Evaluation loaders whose workers persist, by the name of their set.
        self._eval_dataloaders: dict[str, Any] = getattr(self, "_eval_dataloaders", {})
        self._found: dict[str, Any] = {}
        self._accelerator: Any = None
        self.label_names: list[str]
        self.can_return_loss: bool
        self.model_accepts_loss_kwargs: bool
        self._signature_columns: list[str] | None = getattr(self, "_signature_columns", None)
        self.neftune_noise_alpha: float | None = self.args.neftune_noise_alpha
        self._neftune_hook: Any = None
        self._session: TrainSession | None = None
        # What a search tries now, and what became of it.
        self._trial_run: TrialRun | None = None
        self._loaders = LoaderCache(limit=1)
        self._depth = 0
        self._stage = "train"
        # Of the rehearsal for an estimate of memory, while one goes on.
        self._num_estimated = 0
        self._eval_logs: Mapping[str, Any] = {}
        self.current_flos: float = 0
        self._counted: tuple[nn.Module, int] | None = None
        # What a recurrent model hands from step to step (`past_index`).
        self._past: Any = None
        # Stays after a run, for scripts that ask what was logged.
        self._loss_window: LossWindow | None = None
        # There for as long as a run lasts.
        self._training_mode: TrainingMode | None = None
        self._schedule_is_own = self._optimizer_is_the_tasks = False

    @property
    def tokenizer(self) -> Any:
        """The older name of `processing_class`."""
        warn_once("Trainer.tokenizer is deprecated; use Trainer.processing_class.", FutureWarning)
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        warn_once("Trainer.tokenizer is deprecated; use Trainer.processing_class.", FutureWarning)
        self.processing_class = value

    @property
    def compute_loss_func(self) -> Any:
        """The function that computes the loss in place of the model; it may be set at any time."""
        return self._slot_loss_func

    @compute_loss_func.setter
    def compute_loss_func(self, function: Any) -> None:
        self._slot_loss_func = function
        task = vars(self).get("task")
        if isinstance(task, ModelTask):
            task.use_loss(function)

    @property
    def output_dir(self) -> Path:
        """The folder that checkpoints and results go to; it stays where it is when the working directory changes.

        For a remote `args.output_dir` it is the local mirror, from which they are uploaded.
        """
        return self._output.folder

    @property
    def callback_handler(self) -> CallbackHandler:
        """What calls the callbacks; one that is assigned gets this Trainer's arguments, state and control."""
        return self._callback_handler

    @callback_handler.setter
    def callback_handler(self, handler: CallbackHandler) -> None:
        if not isinstance(handler, CallbackHandler):
            raise ConfigError(
                f"Cannot use a {type(handler).__name__} as callback_handler:",
                "The loops call the callbacks through hftrain's CallbackHandler.",
                "Derive it from hftrain.CallbackHandler.",
            )
        handler.args, handler.state, handler.control = self.args, self.state, self.control
        self._callback_handler = handler

    @property
    def deepspeed(self) -> Any:
        """DeepSpeed's engine while a run has one, else None."""
        return self.model_wrapped if self.is_deepspeed_enabled and self.model_wrapped is not self.model else None

    @deepspeed.setter
    def deepspeed(self, value: Any) -> None:
        if value is not None and value is not self.model_wrapped:
            raise ConfigError(
                "Cannot take an assigned trainer.deepspeed:",
                "The strategy makes the engine and trains with it.",
                "Pass strategy=DeepSpeedStrategy(...), or set args.deepspeed.",
            )

    @property
    def _train_batch_size(self) -> int:
        """Training samples per process and micro-step; set, it changes `args.per_device_train_batch_size`."""
        return self.args.train_batch_size

    @_train_batch_size.setter
    def _train_batch_size(self, value: int) -> None:
        replicas = max(self.args.train_batch_size // self.args.per_device_train_batch_size, 1)
        self.args.per_device_train_batch_size = value // replicas

    @property
    def place_model_on_device(self) -> bool:
        """Whether the Trainer moves the model to the device: not a model that is spread, nor with DeepSpeed."""
        is_left_alone = self.is_model_parallel or self.is_deepspeed_enabled
        return bool(self.strategy.place_model and self.args.place_model_on_device and not is_left_alone)

    @property
    def is_fsdp_enabled(self) -> bool:
        """Whether the strategy is one of FSDP's."""
        return has_engine(self.strategy, "fsdp")

    @property
    def is_deepspeed_enabled(self) -> bool:
        """Whether the strategy is DeepSpeed's."""
        return has_engine(self.strategy, "deepspeed")

    @property
    def is_tp_enabled(self) -> bool:
        """Whether the model's layers are split over processes."""
        return self.get_tp_size() > 1

    @property
    def label_smoother(self) -> LabelSmoother | None:
        """What smooths labels as the training does; None without `label_smoothing_factor`."""
        return LabelSmoother(self.args.label_smoothing_factor) if self.args.label_smoothing_factor else None

    @property
    def accelerator(self) -> Any:
        """A real `accelerate.Accelerator` that agrees with the strategy, made on first use; collective then.

        The loops do not use it: preparing a model or a loader with it changes neither the strategy nor the training.
        Its `backward` is the run's: with the precision's loss scaling, through the strategy's engine, and without a
        division by the accumulation. `sync_gradients` tells in a training step whether an update follows it.

        Using it before `train` launches the strategy. Once it is there, processes that evaluate a plain
        model keep in step, so that an override of `prediction_step` may gather: one that runs out of batches repeats
        its last one and drops the result.
        """
        if self._accelerator is None:
            self.create_accelerator_and_postprocess()
        return self._accelerator

    @accelerator.setter
    def accelerator(self, value: Any) -> None:
        # Before super().__init__() of a subclass there is nothing to agree with, and afterwards a new one is made.
        self._accelerator = None
        if "strategy" in vars(self) and value is not None:
            self._accelerator = adopt_accelerator(value, self.args, self.strategy, self.precision, self._computing)

    @property
    def gather_function(self) -> Callable[..., Any]:
        """What collects predictions: accelerate's `gather_for_metrics`.

        Evaluations hold no sample twice, so that plain `gather` collects the same; nothing else can be set.
        """
        gather: Callable[..., Any] = self.accelerator.gather_for_metrics
        return gather

    @gather_function.setter
    def gather_function(self, value: Any) -> None:
        if value not in (self.accelerator.gather, self.accelerator.gather_for_metrics):
            raise ConfigError(
                "trainer.gather_function was assigned.",
                "Predictions are collected once, at the end of an evaluation; there is no gathering per batch.",
                "Set trainer.accelerator.gather or gather_for_metrics (both give each sample once), or override "
                "evaluation_loop.",
                gather_function=value,
            )

    # -- verbs ---------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> TrainOutput:
        """Train until the planned number of optimizer updates; collective.

        Args:
            resume_from_checkpoint: A checkpoint's folder; True for the newest valid one in `output_dir`; ``"auto"`` for
                that if there is one, else a new run. None does what the arguments say if they say ``"auto"``, else
                starts a new run, as False does.
            trial: An Optuna trial (what it has suggested, else the default space), or a dict of hyper-parameters. They
                are written into the arguments for as long as the run lasts; needs `model_init`.
            ignore_keys_for_eval: Outputs that evaluations during training leave out of the predictions.
            **kwargs: `model_path`, the older name of `resume_from_checkpoint`.

        Returns:
            (global_step, training_loss, metrics); the loss is the mean over the run's updates.

        Raises:
            ConfigError: The run cannot work as set up; raised before any device is touched.
            CheckpointError: There is nothing valid to resume from.
            SystemExit: SIGTERM has stopped the run, after a checkpoint; the exit status is 128 + 15.
            KeyboardInterrupt: SIGINT has, likewise.

        Source: the documented `Trainer.train`.
        """
        if "model_path" in kwargs:
            warn_once("model_path is deprecated; use resume_from_checkpoint.", FutureWarning)
            resume_from_checkpoint = kwargs.pop("model_path")
        if self._session is not None:
            raise ConfigError(
                "train() was called while this Trainer trains.",
                "One Trainer runs one training at a time.",
                "Call it after the run, or use a second Trainer.",
            )
        if kwargs:
            raise TypeError(f"train() got unexpected keyword arguments: {', '.join(sorted(kwargs))}.")
        if trial is not None and self._trial_run is None:
            with self._trying(trial):
                return Trainer.train(self, resume_from_checkpoint, None, ignore_keys_for_eval)
        self._check_data()
        found = existing_part(self.output_dir)
        if saves_at_all(self.args, self.save_policy):
            self._output.check_writable()
        self._check_optimizer()
        check_training(self.args, self.strategy, self.model, compiles=self.compiler.config is not None)
        self.strategy.check_model(self.model)
        self._check_ahead()
        resume = find_resume(self.args, self.strategy, self._output, self._make_manager, resume_from_checkpoint)
        self._check_loop(resume)
        check_fits(self.model, resume, is_split=self.get_tp_size() > 1, is_overridden=self._is_overridden)

        def run(resume: Path | None) -> TrainOutput:
            parts = self.optimizer, self.lr_scheduler

            def attempt() -> TrainOutput:
                self.optimizer, self.lr_scheduler = parts
                session = self._session = TrainSession(self, resume=resume, ignore_keys=ignore_keys_for_eval)
                try:
                    return session.run()
                except RuntimeError as error:
                    report_late_ranks(self.strategy, error)  # as long as the session knows what it was about
                    raise
                finally:
                    session.close()
                    self._session = None
                    self._eval_dataloaders.clear()

            is_retried = self.args.auto_find_batch_size == SMALLER_BATCH
            return with_smaller_batches(self.args, self.strategy, resume, attempt) if is_retried else attempt()

        with self._running("train"):
            if num_batches := self._num_rehearsed:
                return rehearse(
                    self, run, num_batches=num_batches, copy_parts=self._copy_parts, resume=resume, found=found
                )
            return run(resume)

    def estimate_memory(self) -> MemoryEstimate:
        """Return the most memory that a training step of this process holds on its device; collective.

        Rehearses three steps, as `fast_dev_run=3` does, with the chosen strategy and precision, and leaves nothing
        behind. What a caching allocator keeps in reserve is not in it.

        Raises:
            ConfigError: torch does not tell the peak of what the engine or the device holds (DeepSpeed, XLA, MPS).

        Units:
            bytes.
        """
        return estimate_memory(
            self.strategy, self.precision, rehearse=self._estimate, read_wrapped=lambda: self.model_wrapped
        )

    def _estimate(self, num_batches: int, watch: TrainerCallback) -> None:
        """Rehearse so many steps for an estimate, with one more callback."""
        self._num_estimated = num_batches
        self.add_callback(watch)
        try:
            type(self).train(self)
        finally:
            self._num_estimated = 0
            self.remove_callback(watch)

    @property
    def _num_rehearsed(self) -> int:
        """How many batches of each stage are rehearsed, 0 in a real run."""
        return self._num_estimated or int(self.fast_dev_run)

    def _copy_parts(self) -> None:
        """Train copies of model, optimizer, schedule and loops from now on; together, for they refer to each other."""
        if self.model_init is not None:
            self.loops = copy.deepcopy(self.loops)
            return
        self.task, self._outermost, self.optimizer, self.lr_scheduler, self.loops = copy.deepcopy(
            (self.task, self._outermost, self.optimizer, self.lr_scheduler, self.loops)
        )
        self.model, self.model_wrapped = self.task.model, self._outermost

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Run an evaluation, log its metrics and return them, each name prefixed; collective.

        Args:
            eval_dataset: A dataset, a dict of them, or the name of one of `self.eval_dataset`; None takes them all.
            ignore_keys: Outputs to leave out of the predictions.
            metric_key_prefix: What metric names start with.

        Returns:
            Loss (the mean over items), metrics, runtime in seconds and rates, and the epoch.

        Source: the documented `Trainer.evaluate`.
        """
        is_own = eval_dataset is None
        datasets = self.eval_dataset if is_own else eval_dataset
        if isinstance(datasets, Mapping):
            datasets, sets = split_eval_sets(datasets)
            sets, metrics = self._eval_sets if is_own else sets, {}
            for name in filter(lambda name: self._is_due(sets.get(name)), datasets):
                # By its name, so that an override of `get_eval_dataloader` sees what was asked for.
                chosen = name if is_own else datasets[name]
                with self._own_metrics(sets.get(name)):
                    metrics.update(self.evaluate(chosen, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        chosen = self._eval_sets.get(eval_dataset) if isinstance(eval_dataset, str) else None
        with self._own_metrics(chosen), self._evaluating("eval"):
            loader = self._sharded(self.get_eval_dataloader(eval_dataset), is_training=False)
            start_s = time.perf_counter()
            loop = self.prediction_loop if self.args.use_legacy_prediction_loop else self.evaluation_loop
            output = loop(
                loader,
                description="Evaluation",
                prediction_loss_only=True if self.compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
            metrics = {**output.metrics, **self._rates(metric_key_prefix, start_s, output, loader)}
            self._slot_log(metrics)
            if self.state.epoch is not None:
                metrics["epoch"] = self.state.epoch
            self.callback_handler.fire("on_evaluate", metrics=metrics)
            self._report_memory(metrics)
        return metrics

    def _is_due(self, entry: EvalSet | None) -> bool:
        """Tell whether an evaluation set takes part in the evaluation that is running."""
        is_asked_for = self._session is None or bool(self._num_rehearsed)
        return is_asked_for or is_due(entry, self.state, by_epoch=self.args.eval_strategy == "epoch")

    @property
    def _has_all_sets(self) -> bool:
        return all(map(self._is_due, self._eval_sets.values()))

    @contextmanager
    def _own_metrics(self, entry: EvalSet | None) -> Iterator[None]:
        """Let an evaluation set's own metrics take the place of `compute_metrics`."""
        previous = self.compute_metrics
        if entry is not None and entry.metrics is not None:
            self.compute_metrics = entry.metrics  # type: ignore[assignment]
        try:
            yield
        finally:
            self.compute_metrics = previous

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return predictions in the data's order, with labels and metrics where the data has labels; collective.

        Args:
            test_dataset: What to predict on.
            ignore_keys: Outputs to leave out of the predictions.
            metric_key_prefix: What metric names start with.

        Returns:
            (predictions, label_ids, metrics); NumPy arrays or tuples of them, padded with -100 where lengths differ.
            A TaskModule's `prediction_step` gives predictions alone.

        Source: the documented `Trainer.predict`.
        """
        with self._evaluating("predict"):
            loader = self._sharded(self.get_test_dataloader(test_dataset), is_training=False)
            start_s = time.perf_counter()
            loop = self.prediction_loop if self.args.use_legacy_prediction_loop else self.evaluation_loop
            output = loop(
                loader, description="Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
            )
            metrics = {**output.metrics, **self._rates(metric_key_prefix, start_s, output, loader)}
            self.callback_handler.fire("on_predict", metrics=metrics)
            self._report_memory(metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the model over a loader; shared by `evaluate` and `predict`; collective.

        Args:
            dataloader: Gives this rank's batches.
            description: What the progress bar says.
            prediction_loss_only: Keep no predictions; None follows the arguments.
            ignore_keys: Outputs to leave out of the predictions.
            metric_key_prefix: What metric names start with.

        Source: the documented `Trainer.evaluation_loop`.
        """
        if self._stage == "train":
            # By hand, by a callback, or by an override of `evaluate`: nobody has made the model ready.
            with self._evaluating("eval"):
                return self.evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        announce_evaluation(
            dataloader,
            description=description,
            batch_size=self.args.eval_batch_size,
            count_samples=self.num_examples,
        )
        self.callback_handler.refresh(eval_dataloader=dataloader)
        jit = JitModel(self.torch_jit_model_eval, self.task.model) if self.args.jit_mode_eval else None
        parts = self._evaluate_parts(loss_only=loss_only, ignore_keys=ignore_keys, jit=jit)
        batches = self._in_step(dataloader, loss_only=loss_only, ignore_keys=ignore_keys)
        kind = PredictLoop if self._stage == "predict" else EvaluateLoop
        loop = cast(EvaluateLoop, self.loops.get(kind.stage) or kind())
        used = used_in_evaluation(
            self.args,
            self.strategy,
            dataset=getattr(dataloader, "dataset", None),
            takes_turns=batches is not dataloader,
            is_per_batch=parts.config.computes_per_batch and parts.hooks.compute_metrics is not None,
        )
        check_features(loop, used)
        loop.attach(parts)
        try:
            output = loop.run(
                batches,
                is_interleaved=takes_turns(dataloader),
                order=reading_order(dataloader),
                num_expected=expected_samples(dataloader),
            )
        finally:
            loop.detach()
        metrics = to_plain(with_prefix(output.metrics, metric_key_prefix))
        if jit is not None and jit.compilation_s is not None:
            metrics[f"{metric_key_prefix}_jit_compilation_time"] = jit.compilation_s
        return output._replace(metrics=metrics)

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the model over a loader: what `evaluate` and `predict` call with `use_legacy_prediction_loop`.

        It is `evaluation_loop` under its older name, for subclasses that override it, and gives the same numbers.

        Source: the documented `Trainer.prediction_loop`.
        """
        return Trainer.evaluation_loop(
            self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )

    def _in_step(self, dataloader: Any, *, loss_only: bool, ignore_keys: list[str] | None) -> Any:
        """Return the loader, made to keep the ranks in step where the steps may talk to each other."""
        talks = self._accelerator is not None and isinstance(self.task, ModelTask)
        # A split model generates in step (`synced_gpus`).
        talks = talks or (self.strategy.shards_model and generates(self.args))
        if self.strategy.world_size == 1 or not talks:
            return dataloader
        if self.args.batch_eval_metrics and self.compute_metrics is not None and not loss_only:
            # Only the metrics talk, and those take turns of their own.
            check_turns(type(self), is_overridden=any(map(self._is_overridden, ("prediction_step", "compute_loss"))))
            return dataloader

        def repeat(batch: Any) -> None:
            self.prediction_step(self.task.model, batch, loss_only, ignore_keys)

        return InStep(dataloader, all_true=self.strategy.all_true, repeat=repeat)

    def torch_jit_model_eval(self, model: nn.Module, dataloader: Any, training: bool = False) -> nn.Module:
        """Return a model traced with the first batch of a loader; as it is, with a warning, where that fails.

        Args:
            model: In evaluation mode.
            dataloader: Its first batch is the example.
            training: True returns the model as it is.

        Source: the documented `jit_mode_eval`.
        """
        if training:
            return model
        context = self.compute_loss_context_manager
        return trace_model(model, dataloader, prepare=self._prepare_inputs, context=context)

    def _evaluate_parts(
        self, *, loss_only: bool, ignore_keys: list[str] | None, jit: JitModel | None = None
    ) -> EvaluateParts:
        is_prediction = self._stage == "predict"
        # A callback that writes predictions somewhere may ask that they are not returned as well.
        is_replaced = is_prediction and any(
            getattr(callback, "replaces_predictions", False) for callback in self.callback_handler.callbacks
        )

        search = self._shares.search

        def evaluate_batch(batch: Any) -> StepOutput:
            if jit is not None:
                self.task.model = jit.for_batch(batch)
            search.look_at(batch)
            loss, outputs, labels = self.prediction_step(self.task.model, batch, loss_only, ignore_keys)
            return StepOutput(loss=loss, outputs=outputs, labels=labels, logs=self._eval_logs)

        config = evaluate_config(
            self.args,
            keeps_predictions=not loss_only,
            input_name=getattr(self.model, "main_input_name", "input_ids"),
            spill_dir=self.spill_dir,
            returns_predictions=not is_replaced,
        )
        plain = self.task if isinstance(self.task, ModelTask) else None
        hooks = EvaluateHooks(
            evaluate_batch=evaluate_batch,
            count_items=self.task.count_items if plain is None else plain.weights,
            kinds=("",) if plain is None else plain.kinds,
            choose_kind=None if plain is None else search.agree,
            compute_metrics=None if loss_only else self.compute_metrics,
            needs_labels=not is_prediction,
            preprocess_logits=self.preprocess_logits_for_metrics,
            finish=self.strategy.finish_forwards,
            read_metrics=None if is_prediction and not isinstance(self.task, ModelTask) else self._read_metrics,
        )
        return EvaluateParts(config=config, hooks=hooks, group=self.strategy, events=self.callback_handler)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model (and what belongs to it) so that it can be loaded again; the main process writes.

        A transformers model can be reloaded with `from_pretrained`. Collective where the strategy shards the model.
        With `push_to_hub=True` the model is pushed as well, from `args.output_dir`, and waited for.

        Args:
            output_dir: The folder, local or remote; None takes `args.output_dir`.

        Raises:
            CheckpointError: A remote folder cannot be written to; the files are in its local mirror.

        Source: the documented `Trainer.save_model`.
        """
        folder = self._output.locate(output_dir) if output_dir else self.output_dir
        # In a checkpoint each process may write a part of its own; asked for by name, a model is always whole.
        is_split = _internal_call and self.strategy.model_shards(self.model_wrapped) is not None
        with evaluation_weights(self.optimizer):
            weights = {} if is_split else self.strategy.model_state(self.model_wrapped)
            if self.args.should_save:
                folder.mkdir(parents=True, exist_ok=True)
                if not _internal_call:
                    logger.info("Saving model checkpoint to %s", folder)
                self._save(str(folder), state_dict=weights)
        if not (_internal_call and output_dir):
            self._output.publish_together(output_dir)
        if not _internal_call:
            self.strategy.barrier()
            if self.args.push_to_hub:
                self._hub.after_save_model(message="Model save", folder=folder)

    def _save(self, output_dir: str, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        write_model(
            Path(output_dir),
            model=self.model,
            weights=state_dict,
            own=task_state(self.task),
            tool=saved_tool(self.processing_class, self.data_collator),
            arguments=self.args.to_dict(),
        )

    def save_state(self) -> None:
        """Write `trainer_state.json` into `output_dir`; the main process writes."""
        if self.args.should_save:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(self.output_dir / "trainer_state.json"))
            self._output.publish()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add `logs` to the history and tell the callbacks.

        Args:
            logs: Numbers by name.
            start_time: A `time.time()` reading; adds the speed since then, where tokens are counted
                (`include_num_input_tokens_seen`).

        Source: the documented `Trainer.log`.
        """
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen:
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                start_s = start_time - time.time() + time.perf_counter()
                num_tokens = None if self._session is None else self._session.counts.num_tokens()
                logs.update(speed_metrics("train", start_s, num_tokens=num_tokens))
        self.state.log_history.append({**to_plain(logs), "step": self.state.global_step})
        self.callback_handler.fire("on_log", logs=logs)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics as an aligned table; the main process prints."""
        if self.is_world_process_zero():
            print(metrics_table(split, metrics))

    def metrics_format(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return a readable copy of metrics."""
        return metrics_format(metrics)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write ``<split>_results.json`` and add to ``all_results.json``; the main process writes."""
        if self.is_world_process_zero():
            store_metrics(self.output_dir, split, metrics, combined=combined)
            self._output.publish()

    # -- the Hub -------------------------------------------------------------------------------------------------

    @property
    def hub_model_id(self) -> str | None:
        """The full name of the repository on the Hub, known once it was created or found; the main process knows it."""
        return None if self._hub.uploads is None else self._hub.uploads.repo_id

    @property
    def push_in_progress(self) -> Any:
        """The future of the newest push in the background, None before the first; it may be done."""
        return None if self._hub.uploads is None else self._hub.uploads.newest

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository on the Hub, or find it; the main process does.

        Args:
            token: Access token for this call; None takes `args.hub_token` or the stored login.
            private: Whether a new repository is private; None takes `args.hub_private_repo`.

        Raises:
            ConfigError: The Hub refuses the name or the token; a Hub that does not answer is warned of.
            MissingDependencyError: huggingface_hub is not installed.

        Source: the documented `Trainer.init_hf_repo`.
        """
        self._hub.open(token=token, private=private)

    def init_git_repo(self, at_init: bool = False) -> None:
        """Do what `init_hf_repo` does; pushes need no git clone, and no file is ever deleted.

        Source: the documented `Trainer.init_git_repo` (4.24).
        """
        warn_once("init_git_repo is deprecated; use init_hf_repo.", FutureWarning)
        self.init_hf_repo()

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write a draft of a model card, `README.md` in `output_dir`; the main process writes.

        A card that is there keeps its tags and all text that others wrote.

        Args:
            language: Of the model.
            license: None takes that of the base model's page on the Hub.
            tags: Added to the card's tags.
            model_name: None takes the repository's name.
            finetuned_from: The base model; None takes the name the model was loaded by.
            tasks: The Hub's names of tasks; with a dataset they make the metrics readable for the Hub.
            dataset_tags: The Hub's names of datasets.
            dataset: Names of datasets for people.
            dataset_args: Which part of each dataset.

        Raises:
            MissingDependencyError: huggingface_hub is not installed.

        Source: the documented `Trainer.create_model_card`.
        """
        self._hub.write_card(
            log_history=self.state.log_history,
            hyperparameters={
                "total_train_batch_size": self.get_total_train_batch_size(self.args),
                "num_processes": self.strategy.world_size,
                "precision": self.precision.policy.name,
            },
            language=language,
            license=license,
            tags=tags,
            model_name=model_name,
            finetuned_from=finetuned_from,
            tasks=tasks,
            dataset_tags=dataset_tags,
            dataset=dataset,
            dataset_args=dataset_args,
        )
        self._output.publish()

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model into `output_dir` with a model card, and push the folder; collective, the main process pushes.

        Works without `args.push_to_hub` too. Checkpoints, optimizer states and hidden files are left out.

        Args:
            commit_message: Of the commit.
            blocking: Wait for the end.
            token: Access token for this push; None takes `args.hub_token` or the stored login.
            revision: Branch for this push, created if absent; None takes `args.hub_revision`, then the main branch.
            private: Whether a new repository is private; None takes `args.hub_private_repo`.
            **kwargs: For `create_model_card`; `tags` are added to those of the model and of the card.

        Returns:
            The commit's `CommitInfo` if `blocking`, else its `Future`; None on other processes than the main one. (One
            text of the documentation says this the other way round.)

        Raises:
            ConfigError: The Hub refuses the name or the token.
            MissingDependencyError: huggingface_hub is not installed.
            Exception: What huggingface_hub raises when a push fails; with ``blocking=False`` the future holds it.

        Source: the documented `Trainer.push_to_hub`.
        """
        if self._session is not None:
            self._session.checkpoints.settle()
        return self._hub.push(
            message=commit_message, blocking=blocking, token=token, revision=revision, private=private, **kwargs
        )

    def add_callback(self, callback: Any) -> None:
        """Add a callback: an instance, or a class that takes no arguments."""
        self.callback_handler.add(callback)

    def pop_callback(self, callback: Any) -> TrainerCallback | None:
        """Remove and return the first matching callback (by class or identity), or None."""
        popped: TrainerCallback | None = self.callback_handler.pop(callback)
        return popped

    def remove_callback(self, callback: Any) -> None:
        """Remove the first matching callback (by class or identity)."""
        self.callback_handler.remove(callback)

    # -- hooks of checkpoints and of what happens between steps ---------------------------------------------------

    def _running_session(self, asker: str) -> TrainSession:
        if self._session is None:
            raise ConfigError(f"{asker}() was called.", "It acts on a running training.", "Call it while train() runs.")
        return self._session

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Commit a checkpoint of the running session; called by the loop when callbacks ask for a save."""
        self._running_session("_save_checkpoint").save()

    def _get_output_dir(self, trial: Any = None) -> str:
        """Return the folder that checkpoints go to; while a search runs, `output_dir` is the trial's own folder."""
        return str(self.output_dir)

    def _make_manager(self) -> CheckpointManager:
        folder = Path(self._get_output_dir(self._trial))
        return make_manager(self.args, self.strategy, self._output, self.save_policy, folder)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint that was just committed, in the background; called with `push_to_hub` only.

        An override may add files to the folder `output_dir` and call this one.
        """
        self._hub.after_save(Path(checkpoint_folder), step=self.state.global_step)

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
        """Delete the oldest checkpoints beyond `save_total_limit`, in the order of their commits; after each save."""
        self._running_session("_rotate_checkpoints").checkpoints.rotate()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write what a resume needs of optimizer and schedule into a checkpoint; every rank calls it."""
        session = self._running_session("_save_optimizer_and_scheduler")
        session.checkpoints.write_optimizer(Path(output_dir), session.optimizer)

    def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
        """Load what `_save_optimizer_and_scheduler` wrote, at a resume; every rank calls it."""
        session = self._running_session("_load_optimizer_and_scheduler")
        session.checkpoints.read_optimizer(Path(checkpoint), session.optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights into the model in place; at a resume, and for the best model."""
        load_task(self.task, self.model, self.strategy, Path(resume_from_checkpoint), model=model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Put the random number generators where a checkpoint has them; at a resume, when the data are open."""
        self._running_session("_load_rng_state").restore_numbers()

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights; at the end of a run with `load_best_model_at_end`."""
        self._running_session("_load_best_model").checkpoints.load_best()

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor | None = None,
        grad_norm: Any = None,
        model: nn.Module | None = None,
        trial: Any = None,
        epoch: float | None = None,
        ignore_keys_for_eval: list[str] | None = None,
        start_time: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Do what callbacks asked for: log, evaluate, save; after each step and each epoch.

        The arguments tell an override where the run is. `tr_loss` is the sum of the step losses since the last log;
        what this method is given is logged, divided by the steps. An override that logs itself resets `tr_loss` in
        place and sets `_globalstep_last_logged`, as the documented one does.
        """
        self._running_session("_maybe_log_save_evaluate").step_end.act(tr_loss)

    @property
    def _globalstep_last_logged(self) -> int:
        """The update after which the training loss was logged last, for overrides of `_maybe_log_save_evaluate`."""
        return self.state.global_step - (self._loss_window.num_steps if self._loss_window else 0)

    @_globalstep_last_logged.setter
    def _globalstep_last_logged(self, step: int) -> None:
        if self._loss_window is not None:
            self._loss_window.leave(self.state.global_step - step)

    @property
    def _total_loss_scalar(self) -> float:
        """The sum of all step losses that were logged, from which `train_loss` follows; likewise."""
        return self._loss_window.run_total if self._loss_window else 0.0

    @_total_loss_scalar.setter
    def _total_loss_scalar(self, total: float) -> None:
        if self._loss_window is not None:
            self._loss_window.run_total = total

    def _evaluate(
        self, trial: Any = None, ignore_keys_for_eval: list[str] | None = None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate while training, and step a schedule that follows the metric unless told to skip it."""
        session = self._running_session("_evaluate")
        with session.evaluating():
            metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if not skip_scheduler:
            follow_metric(self.lr_scheduler, self.args, self.state, metrics, has_all_sets=self._has_all_sets)
        return metrics

    def _report_to_hp_search(self, trial: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Tell a search's backend the objective of an evaluation while training; the backend may end the trial."""
        # Sets with a cadence of their own: the objective needs all of them.
        if self._trial_run is not None and self._has_all_sets:
            folder = self._get_output_dir(self._trial)
            self._trial_run.note(metrics, step=step, folder=folder, events=self.callback_handler)

    def _determine_best_metric(self, metrics: Mapping[str, Any], trial: Any = None) -> bool:
        """Remember the best evaluation so far in the state, and tell whether this is it."""
        session = self._running_session("_determine_best_metric")
        return session.checkpoints.metric.note(metrics, has_all_sets=self._has_all_sets)

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Return the processes' tensors, concatenated, in the same nesting; collective, and the logged loss's mean."""
        return map_tensors(tensors, self.strategy.gather)

    def _get_learning_rate(self) -> float:
        """Return the learning rate of the first parameter group: where it is logged, the one the step used."""
        used = None if self._session is None else self._session.used_rate
        return self.get_learning_rates()[0] if used is None else used

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Return the module whose forward is called: wrapped to train, bare to evaluate. Collective.

        To train, the strategy wraps, and the optimizer is made within. A wrapper that an override puts around the
        result must be one that the strategy can look through (DDP, DataParallel, torch.compile).
        """
        if training and self._session is not None:
            return self._session.wrap(model)
        return self.strategy.for_evaluation(model)

    # -- hooks of the training step ------------------------------------------------------------------------------

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: Any
    ) -> tuple[Callable[[], AbstractContextManager[Any]], Any]:
        """Return what makes the context that a micro-batch is trained in, and the micro-batch; called before it is."""
        return nullcontext, inputs

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: int | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run forward and backward on one micro-batch.

        Args:
            model: The wrapped model.
            inputs: The micro-batch.
            num_items_in_batch: Items of the whole step; None where nobody needs them.

        Returns:
            The detached loss, scaled to its share of the step.

        Source: the documented `Trainer.training_step`.
        """
        mode = self._training_mode
        if mode is None:
            model.train()
        elif model is not mode.model or not all(map(is_on, mode.flags)):
            mode.enter(model)
        if mode is not None and mode.train_weights is not None:
            mode.train_weights()
        shares = self._shares if self._shares.is_on else None
        # Of the batch as it was counted: overrides may return another, and pop its labels.
        share = 1 if shares is None else shares.share_of(inputs, num_items_in_batch)
        num_items = num_items_in_batch if shares is None else shares.noted(num_items_in_batch)
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            self._is_weighing = True
            loss: torch.Tensor = self._slot_compute_loss(model, inputs, num_items_in_batch=num_items)
            self._is_weighing = False
        if shares is not None:
            loss = shares.weigh(loss, share, num_items_in_batch)
        self._computing.backward(loss)
        return loss.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> Any:
        """Return the loss of one batch, or (loss, outputs).

        Source: the documented `Trainer.compute_loss`.
        """
        if isinstance(self.task, ModelTask):
            loss, outputs = self.task.compute_loss(model, inputs, num_items_in_batch)
            if self.args.past_index >= 0:
                self._past = read_memory(outputs, self.args.past_index, has_loss=self.task.returns_loss)
            if self._steps_itself and not self._is_weighing and self._stage == "train":
                loss = self._shares.over_ranks(loss, num_items_in_batch)
        else:
            result = self.task.training_step(inputs)
            if isinstance(result, torch.Tensor):
                return (result, None) if return_outputs else result
            output = as_step_output(result)
            if output.loss is None:
                raise TaskError(
                    f"{type(self.task).__name__}.training_step was run.",
                    "Its StepOutput holds no loss.",
                    "Return StepOutput(loss=...).",
                )
            if output.logs and self._session is not None:
                self._session.logs.add(output.logs)
            loss, outputs = output.loss, output.outputs
        return (loss, outputs) if return_outputs else loss

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Any], int | torch.Tensor | None]:
        """Take a step's micro-batches and count their items.

        Args:
            epoch_iterator: The epoch's remaining batches.
            num_batches: How many to take; fewer come at the end.
            device: Where a count over ranks is summed.

        Returns:
            The batches (none left: an empty list) and the item count, None where nobody needs it.

        Source: the documented `Trainer.get_batch_samples`.
        """
        batches = list(islice(epoch_iterator, num_batches))
        count = self._get_num_items_in_batch if self._counts_items_itself else self._shares.count
        return batches, count(batches, device) if batches else None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device | None) -> Any:
        """Return the items of a step's micro-batches, None where nobody needs them."""
        return self._shares.count(batch_samples, device)

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context the loss is computed in: the precision's casting, unless the model casts itself."""
        if not self._makes_contexts:
            return nullcontext() if self._casting.is_on else self._computing.autocast()
        stack = ExitStack()
        stack.enter_context(self.torchdynamo_smart_context_manager())
        stack.enter_context(self.autocast_smart_context_manager())
        return stack

    def torchdynamo_smart_context_manager(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: a compiled model needs none.

        Source: the documented `Trainer.torchdynamo_smart_context_manager` (4.24).
        """
        return nullcontext()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Return the precision's casting context.

        Args:
            cache_enabled: Keep cast weights within the context; False casts them at each use.

        Source: the documented `Trainer.autocast_smart_context_manager`.
        """
        if cache_enabled or not self.precision.policy.autocast:
            return self._computing.autocast()
        return torch.autocast(self.strategy.device_type, dtype=self.precision.policy.compute_dtype, cache_enabled=False)

    def _prepare_input(self, data: Any) -> Any:
        """Move one value to the device; an override sees every value of a nested batch."""
        if isinstance(data, Mapping):
            return type(data)({key: self._prepare_input(value) for key, value in data.items()})  # type: ignore[call-arg]
        if isinstance(data, (tuple, list)):
            values = [self._prepare_input(value) for value in data]
            return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
        return self.strategy.to_device(data)

    def _align_special_tokens(self) -> None:
        """Give the model's configurations the tokenizer's special tokens before a training, and say so."""
        changed = align_special_tokens(self.model, self.processing_class)
        if changed and self.strategy.is_main:
            logger.warning(
                "The tokenizer's special tokens differ from the model's. The model's config and generation "
                "config were changed to the tokenizer's: %s.",
                ", ".join(f"{name}={token}" for name, token in changed.items()),
            )

    def _activate_neftune(self, model: nn.Module) -> nn.Module:
        """Add NEFTune's noise to the embeddings of `model`, until `_deactivate_neftune`; mutates the model."""
        assert self.neftune_noise_alpha is not None
        self._neftune_hook = add_noise(find_embeddings(self.strategy.unwrap(model)), self.neftune_noise_alpha)
        return model

    def _deactivate_neftune(self, model: nn.Module) -> None:
        """Take the noise away again; safe to call twice."""
        if self._neftune_hook is not None:
            self._neftune_hook.remove()
        self._neftune_hook = None

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Move a batch to the device."""
        if isinstance(inputs, (dict, Mapping)) and not inputs:
            raise TaskError(
                "A batch was made ready for the model.",
                f"It is empty: no column of the data is one that {type(self.model).__name__}.forward takes"
                + (f" ({', '.join(self._signature_columns)})." if self._signature_columns else "."),
                "Rename the columns, or set remove_unused_columns=False.",
            )
        inputs = self._prepare_input(inputs) if self._walks_inputs else self.strategy.to_device(inputs)
        if self._past is not None:
            inputs = with_memory(inputs, self._past)
        dtype = self._computing.input_dtype
        return inputs if dtype is None else cast_inputs(inputs, dtype, labels=self.label_names)

    # -- hooks of evaluation -------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return loss, outputs and labels of one batch (each may be None), without gradients.

        Source: the documented `Trainer.prediction_step`.
        """
        inputs = self._prepare_inputs(inputs)
        task = self.task
        count = self._shares.count_for_evaluation(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            if isinstance(task, ModelTask):
                ignored = task.keys_to_ignore if ignore_keys is None else ignore_keys
                output = task.predict_batch(
                    lambda batch: self._slot_compute_loss(model, batch, return_outputs=True, num_items_in_batch=count),
                    inputs,
                    loss_only=prediction_loss_only,
                    ignore=ignored,
                    note_outputs=self._note_memory if self.args.past_index >= 0 else None,
                )
            elif self._stage == "predict":
                output = StepOutput(outputs=task.prediction_step(inputs))
            else:
                output = as_step_output(task.evaluation_step(inputs))
        self._eval_logs = output.logs
        if prediction_loss_only:
            return output.loss, None, None
        is_cast = isinstance(task, ModelTask) and self.precision.policy.autocast and self._computing.input_dtype is None
        return output.loss, to_float32(output.outputs) if is_cast else output.outputs, output.labels

    def _note_memory(self, outputs: Any) -> None:
        """Remember what a model that was called without labels hands to the next step."""
        self._past = read_memory(outputs, self.args.past_index, has_loss=False)

    def _read_metrics(self) -> dict[str, Any]:
        """Compute and reset the task's metrics; torchmetrics synchronises ranks."""
        stage, where = ("train", "training_step") if self._stage == "train" else ("eval", "evaluation_step")
        metrics = self.task.metrics(stage)
        if stage == "eval" and type(self.task).metrics is TaskModule.metrics:
            warn_of_unreported(self.task, metrics)
        elif stage == "train":
            warn_of_unread(TaskModule.metrics(self.task, "eval"), metrics)
        return read_metrics(metrics, stage=where, gather_object=self.strategy.gather_object)

    # -- data ----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return this rank's training batches. Source: the documented `Trainer.get_train_dataloader`."""
        check_train_data(self.args, self.train_dataset)
        return self._get_dataloader(
            self.train_dataset,
            "training",
            self._train_batch_size,
            # An override may have the older signature, without the dataset.
            sampler_fn=lambda dataset: call_with(self._get_train_sampler, {"train_dataset": dataset}),
            is_training=True,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return this rank's evaluation batches.

        Args:
            eval_dataset: A dataset, or the name of one in `self.eval_dataset`; None takes `self.eval_dataset`.

        Source: the documented `Trainer.get_eval_dataloader`.
        """
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if eval_dataset is None:
            eval_dataset = self.eval_dataset
        elif isinstance(eval_dataset, str):
            known = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
            if eval_dataset not in known:
                raise ConfigError(
                    f"The evaluation set {eval_dataset!r} was asked for.",
                    "eval_dataset has no set of that name.",
                    suggest(eval_dataset, known) if known else "Pass a dict of datasets as eval_dataset.",
                )
            eval_dataset = known[eval_dataset]
        if eval_dataset is None:
            raise ConfigError(
                "An evaluation was asked for.", "There is no eval_dataset.", "Pass one to evaluate() or Trainer."
            )
        return self._eval_loader(eval_dataset, "evaluation", dataloader_key=name)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return this rank's test batches. Source: the documented `Trainer.get_test_dataloader`."""
        return self._eval_loader(test_dataset, "test")

    def _eval_loader(self, dataset: Any, description: str, *, dataloader_key: str | None = None) -> Any:
        self._check_columns(dataset, role="test_dataset" if description == "test" else "eval_dataset")
        return self._get_dataloader(
            dataset,
            description,
            self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
            dataloader_key=dataloader_key,
        )

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """Return this rank's batches of a dataset, training batches or evaluation batches.

        Args:
            dataset: What to read.
            description: What it is for, in messages.
            batch_size: Samples per process and batch.
            sampler_fn: Gets the dataset and returns its order; None reads it as it comes.
            is_training: Whether all ranks get equally many batches, and a stream its epochs.
            dataloader_key: Keep the loader under this name where its workers persist.
        """
        configure = train_loader_config if is_training else eval_loader_config
        config = configure(self.args, has_accelerator=self.strategy.device_type not in ("cpu", "xla"))
        config = replace(config, batch_size=batch_size)

        def make() -> Any:
            pruned, collate = self._without_unused_columns(dataset, description=description)
            order = SequentialSampler if sampler_fn is None and has_length(dataset) else sampler_fn
            # A stream is read in its own order, whether it has a length or not.
            order = None if isinstance(dataset, IterableDataset) else order
            build = build_train_loader if is_training else build_eval_loader
            return build(
                pruned,
                config,
                collate=collate,
                sampler=None if order is None else order(pruned if is_training else dataset),
                rank=self.strategy.rank,
                world_size=self.strategy.world_size,
            )

        if is_training or not config.persistent_workers:
            return make()
        self._loaders.limit = 1 + (len(self.eval_dataset) if isinstance(self.eval_dataset, Mapping) else 1)
        loader = self._loaders.get((dataset, self.data_collator, self._signature_columns, batch_size), make)
        if dataloader_key is not None:
            self._eval_dataloaders[dataloader_key] = loader
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the order of the training data: by length if asked for, else shuffled by seed and epoch.

        None for a stream.
        """
        dataset = self.train_dataset if train_dataset is None else train_dataset
        lengths = self._length_config(is_training=True)
        if lengths is not None:
            return length_sampler(dataset, lengths, is_training=True)
        if isinstance(dataset, IterableDataset):
            return None
        config = train_loader_config(self.args, has_accelerator=False)
        return default_train_sampler(dataset, config, world_size=self.strategy.world_size)

    def _move_model_to_device(self, model: nn.Module, device: torch.device | str) -> None:
        """Move a second model, such as a teacher; the Trainer's own is placed by its strategy."""
        model.to(device)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Return the order of evaluation data: from long to short if asked for, else as it comes; None for a stream."""
        lengths = self._length_config(is_training=False)
        if lengths is not None:
            config = eval_loader_config(self.args, has_accelerator=False)
            unit = config.batch_size if self.args.dataloader_drop_last else 1
            return length_sampler(
                eval_dataset, lengths, is_training=False, world_size=self.strategy.world_size, unit=unit
            )
        is_ordered = has_length(eval_dataset) and not isinstance(eval_dataset, IterableDataset)
        return SequentialSampler(eval_dataset) if is_ordered else None

    def _length_config(self, *, is_training: bool) -> LengthConfig | None:
        size = self.get_total_train_batch_size(self.args)
        return length_config(self.args, tool=self.processing_class, batch_size=size, is_training=is_training)

    def _set_signature_columns_if_needed(self) -> None:
        """Find the columns to keep, unless they are known; an override sets `self._signature_columns`."""
        if self._signature_columns is None and isinstance(self.task, ModelTask):
            self._find("_signature_columns", signature_columns(self.model, label_names=self.label_names))

    def _columns_to_keep(self) -> list[str] | None:
        if not self.args.remove_unused_columns:
            return None
        self._set_signature_columns_if_needed()
        return self._signature_columns

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Return a dataset without the columns the model does not take; only for one that has columns."""
        about = self._about_columns(description or "given")
        return dataset if about is None else prune_columns(dataset, **about)

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        """Return a collator that drops what the model does not take before it collates."""
        about = self._about_columns(description or "given")
        if about is not None:
            return ColumnPruner(data_collator, **about)
        is_pruned = self.args.remove_unused_columns and makes_tensors(data_collator)
        return TextRemover(data_collator, description=description or "given") if is_pruned else data_collator

    def _without_unused_columns(self, dataset: Any, *, description: str) -> tuple[Any, Callable[[list[Any]], Any]]:
        pruned = self._remove_unused_columns(dataset, description=description)
        return pruned, self._get_collator_with_removed_columns(self.data_collator, description=description)

    def _about_columns(self, description: str) -> dict[str, Any] | None:
        keep = self._columns_to_keep()
        if keep is None:
            return None
        return {"keep": keep, "model_name": type(self.model).__name__, "description": description}

    def _check_columns(self, dataset: Any, *, role: str = "eval_dataset") -> None:
        """Refuse, before anything is launched, what is no dataset, and data of which the model takes no column."""
        check_kind(dataset, role)
        check_one_set(dataset)
        if self._is_overridden("_get_dataloader") or self._is_overridden("_remove_unused_columns"):
            return
        keep = self._columns_to_keep()
        names = None if keep is None or not has_length(dataset) or not len(dataset) else known_columns(dataset)
        if keep is None or names is None:
            return
        inputs = [name for name in keep if name not in (*self.label_names, "label", "label_ids")]
        if not set(names) & set(inputs):
            raise TaskError(
                "A dataset was given.",
                f"Its columns ({', '.join(map(str, names))}) include none that "
                f"{type(self.model).__name__}.forward takes ({', '.join(inputs)}).",
                "Rename the columns, or set remove_unused_columns=False if your collator makes the inputs.",
            )

    def _check_lengths(self, dataset: Any, *, is_training: bool) -> None:
        """Refuse, before anything is launched, data that cannot be ordered by length as asked for."""
        config = self._length_config(is_training=is_training)
        if config is not None:
            check_lengths(dataset, config)

    def _plan_run(self, folder: Path | None, loader: Any, values: tuple[Any, ...], progress: Progress) -> RunPlan:
        """Plan a run that goes on from a checkpoint, or begins; see `plan_run`."""
        args, strategy = self.args, self.strategy
        grouping, policy, split = self._length_config(is_training=True), self.precision.policy, self.get_tp_size()
        geometry = find_geometry(args, strategy, policy, loader, self.train_dataset, grouping=grouping, split=split)
        return plan_run(args, strategy, folder, loader, values, progress=progress, geometry=geometry)

    def _sharded(self, loader: Any, *, is_training: bool) -> Any:
        """Give each rank its share of a loader that an override returned whole, or prepared by accelerate."""
        check_loader(loader)
        config = train_loader_config(self.args, has_accelerator=False)
        share = shard_loader(
            loader,
            rank=self.strategy.rank,
            world_size=self.strategy.world_size,
            is_training=is_training,
            even_batches=config.even_batches,
            split_batches=config.split_batches,
            seed=config.seed,
            dispatch_batches=config.dispatch_batches,
        )
        return share if is_training else cut_short(share, self._num_rehearsed)

    def _check_loop(self, resume: Path | None) -> None:
        """Refuse what the training loop does not support."""
        if "fit" in self.loops:
            dataset = None if self._is_overridden("get_train_dataloader") else self.train_dataset
            parts = self.args, self.strategy, self.precision, self.save_policy
            check_features(self.loops["fit"], used_in_training(*parts, dataset=dataset, resume=resume))
        if "evaluate" in self.loops and self.args.eval_strategy != "no":
            is_mapping = isinstance(self.eval_dataset, Mapping)
            for dataset in self.eval_dataset.values() if is_mapping else [self.eval_dataset]:
                is_per_batch = self.args.batch_eval_metrics and self.compute_metrics is not None
                used = used_in_evaluation(
                    self.args, self.strategy, dataset=dataset, takes_turns=False, is_per_batch=is_per_batch
                )
                check_features(self.loops["evaluate"], used)

    def _check_optimizer(self) -> None:
        """Refuse, before anything is launched, an optimizer that cannot be made."""
        check_made(
            self.strategy,
            self.task,
            optimizers=(self.optimizer, self.lr_scheduler),
            optimizer_cls_and_kwargs=self.optimizer_cls_and_kwargs,
            is_overridden=self._is_overridden,
        )
        is_own = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        makes_own = type(self.task).configure_optimizers is not TaskModule.configure_optimizers
        is_made = "optimizer" in self.strategy.makes
        if not (is_own or makes_own or is_made or self._is_overridden("create_optimizer")):
            self._check_in_backward(self.get_optimizer_cls_and_kwargs(self.args, self.model)[0])
        elif self.optimizer_cls_and_kwargs is not None:
            check_step(self.optimizer_cls_and_kwargs[0])

    def _check_in_backward(self, optimizer: Any) -> None:
        accumulation = self.args.gradient_accumulation_steps
        check_in_backward(optimizer, strategy=self.strategy, precision=self.precision, accumulation=accumulation)

    # -- optimizer and schedule ----------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make the optimizer and the schedule; override this or either of the two it calls."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, optimizer=self.optimizer)

    def create_optimizer(self) -> torch.optim.Optimizer:
        """Make the optimizer unless there is one, and return it. Source: the documented `create_optimizer`."""
        if self.optimizer is None:
            made = read_optimizers(self.task.configure_optimizers(), maker=type(self.task).__name__)
            self._optimizer_is_the_tasks = made[0] is not None
            self.optimizer = made[0]
            if made[1] is not None:
                self.lr_scheduler = made[1]
        if self.optimizer is None:
            if self.optimizer_cls_and_kwargs is None:
                chosen = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            else:
                chosen = self.optimizer_cls_and_kwargs
            names = self.get_decay_parameter_names(self.model)
            self.optimizer = optimizer_from_class(
                *chosen, self.model, weight_decay=self.args.weight_decay, decay_names=names
            )
        return self.optimizer

    def _forget_schedule(self) -> None:
        """Forget a schedule that an earlier train() used up; the optimizer goes on unless the task makes both."""
        if self._optimizer_is_the_tasks:
            self.optimizer = self.lr_scheduler = None
        elif self._schedule_is_own:
            self.lr_scheduler = None
        elif getattr(self.lr_scheduler, "last_epoch", 0) > 0:
            logger.warning("The given schedule has been stepped before; it goes on from where it is.")

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Make the schedule unless there is one, and return it. Source: the documented `create_scheduler`."""
        if self.lr_scheduler is None:
            self._schedule_is_own = True
            chosen = self._require_optimizer("create_scheduler") if optimizer is None else optimizer
            self.lr_scheduler = build_schedule(
                schedule_config(self.args, num_training_steps=num_training_steps), chosen
            )
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of parameters that weight decay applies to."""
        return decay_parameter_names(model)

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Return the optimizer class and its arguments that the training arguments ask for."""
        return optimizer_class(optimizer_config(args), model)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of every parameter group; needs an optimizer."""
        return [float(group["lr"]) for group in self._require_optimizer("get_learning_rates").param_groups]

    def get_num_trainable_parameters(self) -> int:
        """Return how many numbers training may change."""
        return self.strategy.count_trainable(self.model)

    def get_optimizer_group(self, param: str | nn.Parameter | None = None) -> Any:
        """Return the parameter group that holds `param`, or the parameters of every group; needs an optimizer."""
        optimizer = self._require_optimizer("get_optimizer_group")
        if param is None:
            return [group["params"] for group in optimizer.param_groups]
        wanted = dict(self.model.named_parameters()).get(param) if isinstance(param, str) else param
        for group in optimizer.param_groups:
            if any(member is wanted for member in group["params"]):
                return group
        return None

    def _require_optimizer(self, asker: str) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ConfigError(
                f"{asker}() was called.", "There is no optimizer yet.", "Call train() or create_optimizer()."
            )
        return self.optimizer

    # -- facts ---------------------------------------------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        """Tell whether this is the one main process of all."""
        return self.strategy.rank == 0

    def is_local_process_zero(self) -> bool:
        """Tell whether this is the main process of its machine."""
        return self.strategy.local_rank == 0

    def num_examples(self, dataloader: Any) -> int:
        """Return how many samples a loader's data holds, the best estimate where it has no length."""
        return num_examples(dataloader, batch_size=self.args.train_batch_size)

    def num_tokens(self, train_dl: Any, max_steps: int | None = None) -> int:
        """Return the input tokens that a loader gives, by walking over it once.

        Args:
            train_dl: A loader whose batches hold the model's main input.
            max_steps: Batches to count, going round again where there are fewer; None counts each batch once.

        Source: the documented `Trainer.num_tokens`.
        """
        with preserved_rng():
            return count_tokens(
                train_dl, token_counter(self.args, self.model, self.processing_class), max_batches=max_steps
            )

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of one micro-batch: what the model's own method says.

        Of a transformers model without one: 6 for each parameter outside of the embeddings and each element of the main
        input. Else 0. Override it to have them counted in `state.total_flos`.

        Source: the documented `Trainer.floating_point_ops`.
        """
        model = self.model
        count = getattr(model, "floating_point_ops", None)
        if callable(count):
            return count(inputs)  # type: ignore[no-any-return]
        name = getattr(model, "main_input_name", "input_ids")
        if not hasattr(model, "num_parameters") or name not in inputs:
            return 0
        if self._counted is None or self._counted[0] is not model:
            # Once, for it walks over all parameters.
            self._counted = model, model.num_parameters(exclude_embeddings=True)  # type: ignore[operator]
        return int(6 * inputs[name].numel() * self._counted[1])

    def _add_flos(self, number: float) -> None:
        self.current_flos += number

    def store_flos(self) -> None:
        """Add this process's operations since the last call, over all processes, to `state.total_flos`; collective."""
        self.state.total_flos += sum(self.strategy.gather_object(float(self.current_flos)))
        self.current_flos = 0

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples per optimizer update, all ranks together; ranks that split a layer share theirs."""
        return total_batch_size(args, world_size=self.strategy.world_size // self.get_tp_size())

    def get_tp_size(self) -> int:
        """Return over how many processes each layer is split, 1 if none is.

        Source: the documented `Trainer.get_tp_size`.
        """
        return tensor_parallel_size(self.model, getattr(self.strategy, "config", None))

    def get_cp_size(self) -> int:
        """Return over how many processes a sequence is split: 1. Source: the documented `Trainer.get_cp_size`."""
        return 1

    def get_sp_size(self) -> int:
        """Return over how many processes a sequence is split: 1. Source: the documented `Trainer.get_sp_size`."""
        return 1

    def create_accelerator_and_postprocess(self) -> None:
        """Make `accelerator` again; launches the strategy. Collective."""
        self._accelerator = make_accelerator(self.args, self.strategy, self.precision, self._computing)

    def propagate_args_to_deepspeed(self, auto_find_batch_size: bool = False) -> None:
        """Write the arguments into the DeepSpeed config.

        Source: the documented `Trainer.propagate_args_to_deepspeed`.
        """
        propagate = getattr(self.strategy, "propagate_args", None)
        if not self.is_deepspeed_enabled or propagate is None:
            raise ConfigError(
                "propagate_args_to_deepspeed() was called.",
                f"strategy={self.strategy.name!r} has no DeepSpeed config.",
                "Pass deepspeed= in the arguments, or leave the call out.",
            )
        propagate(self.args, auto_find_batch_size=auto_find_batch_size)

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | HPSearchBackend | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Train again and again with other hyper-parameters, and return the best run; collective.

        Each trial makes a new model with `model_init`, and writes to a folder of its own below `output_dir`. The
        arguments hold a trial's values while it runs, and are as before afterwards. Evaluations while training are
        reported to the backend, which may end the trial; the objective is that of the model the trial ends with.

        Args:
            hp_space: Gets the trial and returns values by setting (Optuna); returns the space (Ray Tune, wandb). By
                default learning rate 1e-6 to 1e-4, 1 to 5 epochs, seed 1 to 40, batch size 4 to 64.
            compute_objective: Gets an evaluation's metrics and returns a number, or one for each direction; by default
                the loss if there are no other metrics, else the sum of those.
            n_trials: How many trials to run.
            direction: "minimize" or "maximize"; a list for several objectives (Optuna).
            backend: "optuna", "ray" or "wandb"; by default the first of them that is installed.
            hp_name: Gets the trial and names it and its folder; by default ``run-<id>``.
            **kwargs: For `optuna.create_study` and `Study.optimize`, for `ray.tune.run`, or for the sweep (`sweep_id`,
                `project`, `entity`, `name`, `metric`).

        Returns:
            The best run; with several directions those that no other run beats in all of them.

        Raises:
            ConfigError: There is no `model_init` or nothing to evaluate on, a value does not fit, or no trial ended.
            MissingDependencyError: The backend is not installed.

        Source: the documented `Trainer.hyperparameter_search`.
        """
        has_data = self.eval_dataset is not None or any(map(self._is_overridden, ("get_eval_dataloader", "evaluate")))
        check_search(self.model_init, fast_dev_run=self.fast_dev_run, has_data=has_data)
        self.hp_search_backend = choose_backend(backend)
        try:
            return search(
                self,
                self.hp_search_backend,
                trying=partial(self._trying, compute_objective=compute_objective, hp_name=hp_name),
                space=hp_space,
                num_trials=n_trials,
                direction=direction,
                options=kwargs,
            )
        finally:
            self.hp_search_backend = None

    @property
    def _trial(self) -> Any:
        """What a search tries now, as the backend gave it."""
        return None if self._trial_run is None else self._trial_run.trial

    @contextmanager
    def _trying(self, trial: Any, **options: Any) -> Iterator[TrialRun]:
        """Train with a trial's values; see `trying`."""
        noise, given = self.neftune_noise_alpha, self.args.neftune_noise_alpha
        try:
            with trying(self.args, self._output, self.model_init, trial, **options) as run:
                if self.args.neftune_noise_alpha != given:
                    self.neftune_noise_alpha = self.args.neftune_noise_alpha
                self._trial_run = run
                self._follow_arguments()
                yield run
        finally:
            self._trial_run, self.neftune_noise_alpha = None, noise
            self._follow_arguments()

    def _follow_arguments(self) -> None:
        """Renew what was made from the arguments, which have changed."""
        self._accelerator = None
        if self.is_deepspeed_enabled:
            self.propagate_args_to_deepspeed()

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any, total_train_batch_size: int
    ) -> tuple[int, int, int, int, bool, int | None, int]:
        """Return the run's length.

        Returns:
            (num_train_epochs, num_update_steps_per_epoch, num_examples, num_train_samples, epoch_based,
            len_dataloader, max_steps).

        Source: the documented `Trainer.set_initial_training_values`.
        """
        num_batches = len(dataloader) if has_length(dataloader) else None
        plan = train_plan(
            args,
            num_batches=num_batches,
            num_examples=self.num_examples(dataloader) if num_batches is not None else 0,
            total_batch_size=total_train_batch_size,
        )
        return (
            plan.num_epochs,
            plan.steps_per_epoch,
            plan.num_examples,
            plan.num_samples,
            args.max_steps <= 0,
            plan.num_batches,
            plan.max_steps,
        )

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Build the model with `model_init`, the random number generators freshly seeded."""
        assert self.model_init is not None
        set_seed(self.args.seed)
        parameters = inspect.signature(self.model_init).parameters.values()
        if sum(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters) > 1:
            raise ConfigError(
                "model_init was given.", "It takes more than the trial.", "Let it take no argument, or the trial."
            )
        model = self.model_init(trial) if takes_trial(self.model_init) else self.model_init()
        if model is None:
            raise ConfigError("model_init() was called.", "It returned None.", "Return the model from model_init.")
        return model

    # -- running -------------------------------------------------------------------------------------------------

    @contextmanager
    def _running(self, stage: str) -> Iterator[None]:
        """Launch the strategy and open the precision for as long as a verb runs."""
        previous, self._stage = self._stage, stage
        self._depth += 1
        try:
            if self._depth == 1:
                self._resolve_hooks(vars(self))  # again, for scripts that assign hooks to the instance
                self._memory.start("test" if stage == "predict" else stage)
                self.strategy.launch()
                self.precision.open(self.strategy.device, self.strategy.scaler_factory)
                if isinstance(self.task, ModelTask):
                    self.task.label_names, self.task.can_return_loss = list(self.label_names), self.can_return_loss
                self.compiler.open()
                if self.strategy.watch is not None:
                    self.strategy.watch.where = self._whereabouts
            with sharing_verbosity():
                yield
        except Exception as error:
            if isinstance(error, RuntimeError):
                report_late_ranks(self.strategy, error)
            maker = f"{type(self).__name__}.compute_loss" if self._is_overridden("compute_loss") else None
            maker = maker or (None if self.compute_loss_func is None else "compute_loss_func")
            explain_mistake(error, self.task, self.model, label_names=self.label_names, loss_maker=maker)
            raise
        finally:
            self._depth -= 1
            self._stage = previous
            if self._depth == 0:
                self._casting.undo()
                self.compiler.close()
                self.precision.close()
                self._memory.stop()

    def _note_sync(self, syncs: bool) -> None:
        """Note, and tell the accelerator if there is one, whether an update follows the micro-step that begins."""
        self._computing.syncs = syncs
        if self._accelerator is not None:
            tell_sync(self._accelerator, syncs)

    def _make_shares(self) -> LossShares:
        """Return what weighs the losses, by the hooks as they are now."""
        plain = self.task if isinstance(self.task, ModelTask) else None
        search = MeanSearch(
            plain,
            self.strategy,
            self.precision.policy,
            self._computing,
            is_split=self.strategy.shards_model or self.is_deepspeed_enabled or self.is_tp_enabled,
            makes_inputs=any(map(self._is_overridden, ("_prepare_inputs", "_prepare_input"))),
        )
        hooks = LossHooks(
            compute_loss=self.compute_loss,
            compute_loss_func=self.compute_loss_func,
            is_overridden=self._is_overridden,
            takes_count=self._loss_takes_count,
            accepts_count=bool(self.model_accepts_loss_kwargs),
            says_divided=getattr(self, "loss_is_scaled_for_ga", None),
            is_compiled=self.compiler.config is not None,
            get_batch_samples=self._slot_get_batch_samples,
        )
        return LossShares(self.args, self.strategy, self.task, hooks, search)

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """How many micro-batches make the present step."""
        return self._shares.num_micro_batches

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, number: int) -> None:
        self._shares.num_micro_batches = number

    def _cast_model(self) -> None:
        """Let the model cast itself where code of the user's computes with what it returns."""
        names = ("compute_loss", "training_step", "prediction_step")
        functions = [getattr(self, name) for name in filter(self._is_overridden, names)]
        functions += [self.compute_loss_func] if callable(self.compute_loss_func) else []
        if not self._makes_contexts and is_cast_inside(self.precision.policy, self.strategy, self.task, functions):
            self._casting.apply(self.model)

    def _whereabouts(self) -> str:
        return whereabouts(
            is_idle=self._depth == 0,
            stage=self._stage,
            step=self.state.global_step,
            phase=None if self._session is None else self._session.phase,
        )

    @contextmanager
    def _evaluating(self, stage: str, *, casts: bool = True) -> Iterator[None]:
        """Evaluate the unwrapped model in evaluation mode, and leave weights, modes and random numbers as they were."""
        with self._running(stage), preserved_rng(), evaluation_weights(self.optimizer), ExitStack() as stack:
            dtype = full_eval_dtype(self.args) if casts and self._computing.input_dtype is None else None
            if self._session is None:
                self.model = self.task.model = self.precision.convert(self.model)
                # Cast before it is placed: the exact weights wait in host memory, and the device holds half of them.
                stack.enter_context(cast_weights(self.model, dtype, keep_on=torch.device("cpu")))
                place_task(self.task, self.strategy)
                self.compiler.compile(self.model)
                self._cast_model()
            else:
                stack.enter_context(cast_weights(self.model, dtype))
            wrapped, modes = self.task.model, [(module, module.training) for module in self.task.modules()]
            self.task.model = self._wrap_model(wrapped, training=False)
            self.task.eval()
            for metric in self.task.metrics("eval").values():
                metric.reset()
            computing = self._computing
            before = self._past, computing.input_dtype, computing.autocast
            self._past = None
            if dtype is not None:
                computing.input_dtype, computing.autocast = dtype, nullcontext
            try:
                yield
            finally:
                self._past, computing.input_dtype, computing.autocast = before
                self.strategy.after_evaluation(wrapped)
                self.task.model = wrapped
                for module, was_training in modes:
                    module.training = was_training

    def _rates(self, prefix: str, start_s: float, output: Any, loader: Any) -> dict[str, float]:
        # An override in the older style returns a PredictionOutput, which has no count.
        num_samples = getattr(output, "num_samples", None)
        num_steps = None
        if num_samples is not None:
            num_steps = math.ceil(num_samples / (self.args.eval_batch_size * self.strategy.world_size))
        # Tracing happens once and says nothing about the speed.
        start_s += output.metrics.get(f"{prefix}_jit_compilation_time", 0.0)
        return speed_metrics(prefix, start_s, num_samples=num_samples, num_steps=num_steps)

    def _report_memory(self, metrics: dict[str, Any]) -> None:
        """Add what the running verb took, unless it is part of another one."""
        if self._depth == 1:
            metrics.update(self._memory.stop())


def _settled(args: TrainingArguments | None) -> TrainingArguments:
    """Check the arguments, and fill in what follows from others; by default those for a folder in the working one."""
    args = TrainingArguments("tmp_trainer") if args is None else args
    check_arguments(args)
    settle(args)
    settle_sharing(args)
    check_local_rank(args)
    return args


def _one_of(value: Any, older: Any, *, new: str, old: str) -> Any:
    """Take a value under its new or its older name."""
    if older is None:
        return value
    if value is not None:
        raise ConfigError(f"{new} and {old} were given.", "They are the same thing.", f"Keep {new}.")
    warn_once(f"{old} is deprecated; use {new}.", FutureWarning)
    return older
