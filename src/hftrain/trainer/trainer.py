"""The documented Trainer: verbs that delegate, and hooks that the loops call through the instance."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from hftrain.adapter.data import eval_loader_config, length_config, total_batch_size, train_loader_config
from hftrain.adapter.deepspeed import settle_deepspeed
from hftrain.adapter.evaluate import evaluate_config
from hftrain.adapter.optim import optimizer_config, schedule_config
from hftrain.adapter.plan import train_plan
from hftrain.adapter.precision import precision_request
from hftrain.adapter.sharing import check_configured_state, non_blocking_copies, settle_sharing
from hftrain.adapter.strategy import strategy_request
from hftrain.adapter.unwired import check_local_rank, check_wired
from hftrain.arguments.settle import settle
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks import CallbackRunner, TrainerCallback, default_callbacks
from hftrain.checkpoint.parts import save_arguments
from hftrain.checkpoint.weights import save_task_state, save_weights
from hftrain.core.errors import ConfigError, TaskError, explain, suggest
from hftrain.core.log import get_logger, get_verbosity, set_verbosity, warn_once
from hftrain.core.progress import TrainerControl
from hftrain.core.seed import enable_full_determinism, preserved_rng, set_seed
from hftrain.core.state import TrainerState
from hftrain.core.types import EvalLoopOutput, PredictionOutput, StepOutput, TrainOutput
from hftrain.data.collators import DataCollatorWithPadding, default_data_collator
from hftrain.data.columns import ColumnPruner, prune_columns, removable_columns, signature_columns
from hftrain.data.dispatch import DispatchLoader
from hftrain.data.grouping import LengthConfig, check_lengths, length_sampler, reading_order
from hftrain.data.loaders import build_eval_loader, build_train_loader
from hftrain.data.persistent import LoaderCache
from hftrain.data.sharding import shard_loader
from hftrain.data.sizes import has_length, num_examples
from hftrain.loops.evaluate import EvaluateLoop, EvaluateSlots
from hftrain.loops.predict import PredictLoop
from hftrain.optim.groups import decay_parameter_names
from hftrain.optim.optimizers import optimizer_class, optimizer_from_class
from hftrain.optim.schedules import build_schedule
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions
from hftrain.step.legality import check_legal
from hftrain.storage.files import check_writable
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import create_strategy
from hftrain.task.introspect import is_recomputing
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule, as_step_output
from hftrain.trainer.checks import (
    check_arguments,
    check_best_metric,
    check_eval_data,
    check_evaluation,
    check_model,
    check_parts,
    check_sharding,
    check_task,
    check_train_data,
    check_unused_by_task,
    read_optimizers,
)
from hftrain.trainer.debugging import debug_callbacks
from hftrain.trainer.engines import check_made
from hftrain.trainer.hub import TrainerHub
from hftrain.trainer.reports import (
    format_metrics,
    metrics_table,
    speed_metrics,
    store_metrics,
    to_plain,
    with_prefix,
)
from hftrain.trainer.saving import find_resume, task_state
from hftrain.trainer.session import TrainSession, place_task
from hftrain.trainer.signatures import accepts, taking
from hftrain.trainer.weighing import LossShares

logger = get_logger(__name__)


class Trainer:
    """Train, evaluate and predict with a `TaskModule` or any model, by the documented Hugging Face Trainer's surface.

    Nothing is launched and no device is touched before the first verb (`train`, `evaluate`, `predict`) runs.

    Args:
        model: A `TaskModule`, or an `nn.Module` that returns its loss (first in a tuple, or under ``"loss"``).
        args: The documented arguments; None writes to ``tmp_trainer``.
        data_collator: Makes a batch of samples; by default pads with `processing_class` if it can, else stacks.
        train_dataset: What to train on; may be an iterable without length (then set `max_steps`).
        eval_dataset: What to evaluate on; a dict holds several sets, each with metrics of its own name.
        processing_class: Tokenizer or processor; pads batches and is saved beside the model.
        model_init: Builds the model anew at each `train()`.
        compute_loss_func: ``f(outputs, labels, num_items_in_batch=...)`` in place of the model's own loss.
        compute_metrics: ``f(EvalPrediction) -> dict``.
        callbacks: Instances or classes, added to the default ones.
        optimizers: An optimizer and a schedule to use instead of the arguments' (either may be None).
        optimizer_cls_and_kwargs: A class and its arguments, in place of `args.optim`.
        preprocess_logits_for_metrics: ``f(logits, labels) -> logits``, run before predictions are kept.
        strategy: A strategy's name or an instance; wins over the arguments, which must not contradict it.
        precision: A precision's name or an instance; likewise.
        tokenizer: The older name of `processing_class`.
        callback: The older guide's name of `callbacks`.

    Raises:
        ConfigError: A setting is unknown, contradicts another, or is not wired in this version.
        TaskError: The task does not keep its side of the contract.

    Source: the documented `Trainer`.
    """

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
        tokenizer: Any = None,
        callback: Sequence[Any] | None = None,
    ) -> None:
        self.args = TrainingArguments("tmp_trainer") if args is None else args
        check_arguments(self.args)
        settle(self.args)
        settle_sharing(self.args)
        check_local_rank(self.args)
        check_model(model, model_init)
        check_parts(
            self.args,
            model_init=model_init,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            collator=data_collator,
        )
        self._make_parts(model, strategy, precision)
        check_sharding(self.args, self.strategy, optimizers=optimizers)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        check_eval_data(self.args, eval_dataset)
        check_evaluation(
            self.args, eval_dataset=eval_dataset, has_own_loader=self._is_overridden("get_eval_dataloader")
        )
        self.model_init = model_init
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer: torch.optim.Optimizer | None
        self.lr_scheduler: Any
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.processing_class = _one_of(processing_class, tokenizer, new="processing_class", old="tokenizer")
        self._start_idle()
        if self.args.log_level != "passive" or self.args.process_index > 0:
            set_verbosity(self.args.get_process_log_level())
        (enable_full_determinism if self.args.full_determinism else set_seed)(self.args.seed)
        self._adopt_model(self.call_model_init() if model is None or model_init is not None else model)
        check_unused_by_task(self.args, self.task, compute_loss_func=compute_loss_func)
        check_best_metric(self.args, task=self.task, compute_metrics=compute_metrics, eval_dataset=eval_dataset)
        self.data_collator = data_collator or self._default_collator()
        self._has_own_collator = data_collator is not None
        self._resolve_hooks()
        self._hub.start()
        self._make_callbacks([*(callbacks or ()), *(callback or ())])

    # -- construction --------------------------------------------------------------------------------------------

    def _make_parts(self, model: Any, strategy: str | Strategy | None, precision: str | Precision | None) -> None:
        """Choose strategy and precision and refuse what cannot work; nothing is launched."""
        is_checkpointing = self.args.gradient_checkpointing or is_recomputing(model)
        name, options = strategy_request(self.args, strategy, is_checkpointing=bool(is_checkpointing))
        precision_name, precision_options = precision_request(self.args, precision)
        check_wired(self.args)
        self.strategy = strategy if isinstance(strategy, Strategy) else create_strategy(name, **options)
        self.precision = (
            precision if isinstance(precision, Precision) else precisions.create(precision_name, **precision_options)
        )
        settle_deepspeed(self.args, self.strategy, self.precision)
        check_legal(self.strategy, self.precision)
        check_configured_state(self.args, self.strategy.planned_device)
        self.strategy.non_blocking = non_blocking_copies(self.args)

    def _adopt_model(self, model: nn.Module) -> None:
        """Make `model` the one to train: a plain module becomes a `ModelTask`."""
        if isinstance(model, TaskModule):
            self.task: TaskModule = model
        else:
            self.task = ModelTask(
                self.strategy.unwrap(model),
                label_names=self.args.label_names,
                label_smoothing=self.args.label_smoothing_factor,
                compute_loss_func=self.compute_loss_func,
            )
        check_task(self.task)
        self.model: nn.Module = self.strategy.unwrap(self.task.model)
        self.task.model = self.model
        self.model_wrapped: nn.Module = self.model
        is_plain = isinstance(self.task, ModelTask)
        self.label_names: list[str] = list(self.task.label_names) if isinstance(self.task, ModelTask) else ["labels"]
        self.can_return_loss = self.task.can_return_loss if isinstance(self.task, ModelTask) else False
        self.model_accepts_loss_kwargs = self.task.accepts_item_count if isinstance(self.task, ModelTask) else False
        self._signature_columns = signature_columns(self.model, label_names=self.label_names) if is_plain else None

    def _default_collator(self) -> Callable[[list[Any]], Any]:
        tool = self.processing_class
        pads = hasattr(tool, "pad") and (hasattr(tool, "pad_token_id") or hasattr(tool, "padding_value"))
        return DataCollatorWithPadding(tool) if pads else default_data_collator

    def _resolve_hooks(self) -> None:
        """Look at the hooks' signatures once, so that overrides in the older forms keep working."""
        self._compute_loss = taking(self.compute_loss, 3, "num_items_in_batch")
        self._loss_takes_count = accepts(self.compute_loss, "num_items_in_batch")
        self._training_step = taking(self.training_step, 2, "num_items_in_batch")
        self._get_batch_samples = taking(self.get_batch_samples, 2, "device")
        self._log = taking(self.log, 1, "start_time")
        self._shares = LossShares(self)

    def _make_callbacks(self, callbacks: Sequence[Any]) -> None:
        disables = self.args.disable_tqdm
        disables = get_verbosity() > 30 if disables is None else disables
        self.control = TrainerControl()
        self.state = self._new_state()
        self.callback_handler = CallbackRunner(
            [*default_callbacks(disable_tqdm=disables), *debug_callbacks(self), *callbacks],
            args=self.args,
            state=self.state,
            control=self.control,
            model=self.model,
            processing_class=self.processing_class,
            tokenizer=self.processing_class,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            train_dataloader=None,
            eval_dataloader=None,
        )
        self.callback_handler.fire("on_init_end")

    def _new_state(self) -> TrainerState:
        return TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )

    def _is_overridden(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(Trainer, name)

    def _start_idle(self) -> None:
        """Set what only a running verb changes."""
        self._start_folder = Path.cwd()
        self._hub = TrainerHub(self)
        self.is_in_train = False
        self.is_model_parallel = False
        self._session: TrainSession | None = None
        self._loaders = LoaderCache(limit=1)
        self._depth = 0
        self._stage = "train"
        self._eval_logs: Mapping[str, Any] = {}
        # Replaced for as long as a run lasts by what its stepper says.
        self._backward: Callable[[torch.Tensor], None] = self.precision.backward
        self._autocast: Callable[[], AbstractContextManager[Any]] = self.precision.autocast
        self._schedule_is_own = self._optimizer_is_the_tasks = False

    @property
    def tokenizer(self) -> Any:
        """The older name of `processing_class`."""
        return self.processing_class

    @property
    def output_dir(self) -> Path:
        """The folder that checkpoints and results go to; it stays where it is when the working directory changes."""
        folder = str(self.args.output_dir)
        return Path(folder) if "://" in folder else self._start_folder / folder

    @property
    def place_model_on_device(self) -> bool:
        """Whether the Trainer moves the model to the device; DeepSpeed's engine does so itself."""
        return bool(self.args.place_model_on_device) and not self.is_deepspeed_enabled

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
            resume_from_checkpoint: A checkpoint's folder, or True for the newest valid one in `output_dir`.
            trial: Hyper-parameter search; not wired in this version.
            ignore_keys_for_eval: Outputs that evaluations during training leave out of the predictions.
            **kwargs: `model_path`, the older name of `resume_from_checkpoint`.

        Returns:
            (global_step, training_loss, metrics); the loss is the mean over the run's updates.

        Raises:
            ConfigError: The run cannot work as set up; raised before any device is touched.
            CheckpointError: There is nothing valid to resume from.

        Source: the documented `Trainer.train`.
        """
        if "model_path" in kwargs:
            warn_once("model_path is deprecated; use resume_from_checkpoint.", FutureWarning)
            resume_from_checkpoint = kwargs.pop("model_path")
        if self._session is not None:
            raise ConfigError(
                explain(
                    "train() was called while this Trainer trains.",
                    "One Trainer runs one training at a time.",
                    "Call it after the run, or use a second Trainer.",
                )
            )
        if kwargs:
            raise TypeError(f"train() got unexpected keyword arguments: {', '.join(sorted(kwargs))}.")
        if trial is not None:
            raise ConfigError(explain("train(trial=...) was called.", "It is not wired in this version.", "Leave it."))
        if not self._is_overridden("get_train_dataloader"):
            check_train_data(self.args, self.train_dataset)
            self._check_columns(self.train_dataset)
            if not self._is_overridden("_get_train_sampler"):
                self._check_lengths(self.train_dataset, is_training=True)
        if self.args.eval_strategy != "no" and self.eval_dataset is not None:
            is_dict = isinstance(self.eval_dataset, Mapping)
            for dataset in self.eval_dataset.values() if is_dict else [self.eval_dataset]:
                self._check_columns(dataset)
                if not self._is_overridden("_get_eval_sampler"):
                    self._check_lengths(dataset, is_training=False)
        if self.args.save_strategy != "no":
            check_writable(self.output_dir)
        self._check_optimizer()
        self.strategy.check_model(self.model)
        resume = find_resume(self, resume_from_checkpoint)
        with self._running("train"):
            session = self._session = TrainSession(self, resume=resume, ignore_keys=ignore_keys_for_eval)
            try:
                return session.run()
            finally:
                session.close()
                self._session = None

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
            metrics: dict[str, float] = {}
            for name, dataset in datasets.items():
                # The name, not the data, so that an override of get_eval_dataloader sees what was asked for.
                chosen = name if is_own else dataset
                metrics.update(self.evaluate(chosen, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        with self._evaluating("eval"):
            loader = self._sharded(self.get_eval_dataloader(eval_dataset), is_training=False)
            start_s = time.perf_counter()
            output = self.evaluation_loop(
                loader,
                description="Evaluation",
                prediction_loss_only=True if self.compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
            metrics = {**output.metrics, **self._rates(metric_key_prefix, start_s, output.num_samples, loader)}
            self._log(metrics)
            if self.state.epoch is not None:
                metrics["epoch"] = self.state.epoch
            self.callback_handler.fire("on_evaluate", metrics=metrics)
        return metrics

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
            output = self.evaluation_loop(
                loader, description="Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
            )
            metrics = {**output.metrics, **self._rates(metric_key_prefix, start_s, output.num_samples, loader)}
            self.callback_handler.fire("on_predict", metrics=metrics)
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
        if self._depth == 0:
            with self._evaluating("eval"):
                return self.evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        logger.info("***** Running %s *****", description)
        self.callback_handler.refresh(eval_dataloader=dataloader)
        loop = self._evaluate_loop(loss_only=loss_only, ignore_keys=ignore_keys, events=self.callback_handler)
        is_stream = isinstance(getattr(dataloader, "dataset", None), IterableDataset)
        takes_turns = is_stream or isinstance(dataloader, DispatchLoader)
        output = loop.run(dataloader, is_interleaved=takes_turns, order=reading_order(dataloader))
        return output._replace(metrics=to_plain(with_prefix(output.metrics, metric_key_prefix)))

    def _evaluate_loop(self, *, loss_only: bool, ignore_keys: list[str] | None, events: Any) -> EvaluateLoop:
        is_prediction = self._stage == "predict"

        def evaluate_batch(batch: Any) -> StepOutput:
            loss, outputs, labels = self.prediction_step(self.task.model, batch, loss_only, ignore_keys)
            return StepOutput(loss=loss, outputs=outputs, labels=labels, logs=self._eval_logs)

        config = evaluate_config(
            self.args,
            keeps_predictions=not loss_only,
            input_name=getattr(self.model, "main_input_name", "input_ids"),
        )
        slots = EvaluateSlots(
            evaluate_batch=evaluate_batch,
            count_items=self.task.count_items,
            compute_metrics=None if loss_only else self.compute_metrics,
            needs_labels=not is_prediction,
            preprocess_logits=self.preprocess_logits_for_metrics,
            finish=self.strategy.finish_forwards,
            read_metrics=None if is_prediction and not isinstance(self.task, ModelTask) else self._read_metrics,
        )
        loop = PredictLoop if is_prediction else EvaluateLoop
        return loop(config, slots=slots, group=self.strategy, events=events)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model (and what belongs to it) so that it can be loaded again; the main process writes.

        A transformers model can be reloaded with `from_pretrained`. Collective where the strategy shards the model.
        With `push_to_hub=True` the model is pushed as well, from `args.output_dir`, and waited for.

        Args:
            output_dir: The folder; None takes `args.output_dir`.

        Source: the documented `Trainer.save_model`.
        """
        folder = Path(output_dir) if output_dir else self.output_dir
        # In a checkpoint each process may write a part of its own; asked for by name, a model is always whole.
        is_split = _internal_call and self.strategy.model_shards(self.model_wrapped) is not None
        weights = {} if is_split else self.strategy.model_state(self.model_wrapped)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            self._save(str(folder), state_dict=weights)
        if not _internal_call:
            self.strategy.barrier()
            if self.args.push_to_hub:
                self._hub.after_save_model(message="Model save", folder=folder)

    def _save(self, output_dir: str, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        folder = Path(output_dir)
        save_weights(self.model, folder, state_dict=state_dict, safe=bool(self.args.save_safetensors))
        save_task_state(task_state(self.task), folder)
        if hasattr(self.processing_class, "save_pretrained"):
            self.processing_class.save_pretrained(output_dir)
        save_arguments(self.args.to_dict(), folder)

    def save_state(self) -> None:
        """Write `trainer_state.json` into `output_dir`; the main process writes."""
        if self.args.should_save:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(self.output_dir / "trainer_state.json"))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add `logs` to the history and tell the callbacks.

        Args:
            logs: Numbers by name.
            start_time: A `time.time()` reading; adds the speed since then.

        Source: the documented `Trainer.log`.
        """
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if start_time is not None:
            logs.update(speed_metrics("train", start_time - time.time() + time.perf_counter()))
        self.state.log_history.append({**to_plain(logs), "step": self.state.global_step})
        self.callback_handler.fire("on_log", logs=logs)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics as an aligned table; the main process prints."""
        if self.is_world_process_zero():
            print(metrics_table(split, metrics))

    def metrics_format(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return a readable copy of metrics."""
        return format_metrics(metrics)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write ``<split>_results.json`` and add to ``all_results.json``; the main process writes."""
        if self.is_world_process_zero():
            store_metrics(self.output_dir, split, metrics, combined=combined)

    # -- the Hub -------------------------------------------------------------------------------------------------

    @property
    def hub_model_id(self) -> str | None:
        """The full name of the repository on the Hub, known once it was created or found; the main process knows it."""
        return self._hub.repo_id

    @property
    def push_in_progress(self) -> Any:
        """The future of the newest push in the background, None before the first; it may be done."""
        return self._hub.newest

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository on the Hub, or find it; the main process does.

        Args:
            token: Access token for this call; None takes `args.hub_token` or the stored login.

        Raises:
            ConfigError: The Hub refuses the name or the token; a Hub that does not answer is warned of.
            MissingDependencyError: huggingface_hub is not installed.

        Source: the documented `Trainer.init_hf_repo`.
        """
        self._hub.open(token=token)

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

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model into `output_dir` with a model card, and push the folder; collective, the main process pushes.

        Works without `args.push_to_hub` too. Checkpoints, optimizer states and hidden files are left out.

        Args:
            commit_message: Of the commit.
            blocking: Wait for the end.
            token: Access token for this push; None takes `args.hub_token` or the stored login.
            revision: Branch for this push, created if absent; None takes `args.hub_revision`, then the main branch.
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
        return self._hub.push(message=commit_message, blocking=blocking, token=token, revision=revision, **kwargs)

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

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Commit a checkpoint of the running session; called by the loop when callbacks ask for a save."""
        assert self._session is not None
        self._session.checkpoints.save(self._session.optimizer)

    # -- hooks of the training step ------------------------------------------------------------------------------

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
        inputs = self._prepare_inputs(inputs)
        # Before compute_loss, whose overrides may pop the labels.
        share = self._shares.of(inputs, num_items_in_batch) if self._shares.is_on else None
        with self.compute_loss_context_manager():
            loss: torch.Tensor = self._compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        if share is not None:
            loss = self._shares.weigh(loss, share)
        self._backward(loss)
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
        else:
            result = self.task.training_step(inputs)
            if isinstance(result, torch.Tensor):
                return (result, None) if return_outputs else result
            output = as_step_output(result)
            if output.loss is None:
                raise TaskError(
                    explain(
                        f"{type(self.task).__name__}.training_step was run.",
                        "Its StepOutput holds no loss.",
                        "Return StepOutput(loss=...).",
                    )
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
        return batches, self._shares.count(batches, device)

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context the loss is computed in: the precision's casting."""
        return self._autocast()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Return the precision's casting context; `cache_enabled` must stay True, which is how torch is run."""
        if not cache_enabled:
            raise ConfigError(
                explain(
                    "autocast_smart_context_manager(cache_enabled=False) was called.",
                    "The precision prepares one context for the whole run.",
                    "Use torch.autocast directly.",
                )
            )
        return self._autocast()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Move a batch to the device."""
        if isinstance(inputs, (dict, Mapping)) and not inputs:
            raise TaskError(
                explain(
                    "A batch was made ready for the model.",
                    f"It is empty: no column of the data is one that {type(self.model).__name__}.forward takes"
                    + (f" ({', '.join(self._signature_columns)})." if self._signature_columns else "."),
                    "Rename the columns, or set remove_unused_columns=False.",
                )
            )
        return self.strategy.to_device(inputs)

    # -- hooks of evaluation -------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return loss, outputs and labels of one batch (each may be None), without gradients.

        Source: the documented `Trainer.prediction_step`.
        """
        inputs = self._prepare_inputs(inputs)
        task = self.task
        with torch.no_grad(), self.compute_loss_context_manager():
            if isinstance(task, ModelTask):
                ignored = task.keys_to_ignore if ignore_keys is None else ignore_keys
                output = task.predict_batch(
                    lambda batch: self._compute_loss(model, batch, return_outputs=True),
                    inputs,
                    loss_only=prediction_loss_only,
                    ignore=ignored,
                )
            elif self._stage == "predict":
                output = StepOutput(outputs=task.prediction_step(inputs))
            else:
                output = as_step_output(task.evaluation_step(inputs))
        self._eval_logs = output.logs
        return (output.loss, None, None) if prediction_loss_only else (output.loss, output.outputs, output.labels)

    def _read_metrics(self) -> dict[str, Any]:
        """Compute and reset the task's metrics; torchmetrics synchronises ranks."""
        values: dict[str, Any] = {}
        for name, metric in self.task.metrics("eval" if self._stage != "train" else "train").items():
            value = metric.compute()
            metric.reset()
            values.update(value if isinstance(value, Mapping) else {name: value})
        return values

    # -- data ----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return this rank's training batches. Source: the documented `Trainer.get_train_dataloader`."""
        check_train_data(self.args, self.train_dataset)
        dataset, collate = self._without_unused_columns(self.train_dataset, description="training")
        return build_train_loader(
            dataset,
            train_loader_config(self.args, has_accelerator=self.strategy.device_type != "cpu"),
            collate=collate,
            sampler=self._get_train_sampler(),
            rank=self.strategy.rank,
            world_size=self.strategy.world_size,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return this rank's evaluation batches.

        Args:
            eval_dataset: A dataset, or the name of one in `self.eval_dataset`; None takes `self.eval_dataset`.

        Source: the documented `Trainer.get_eval_dataloader`.
        """
        if eval_dataset is None:
            eval_dataset = self.eval_dataset
        elif isinstance(eval_dataset, str):
            known = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
            if eval_dataset not in known:
                raise ConfigError(
                    explain(
                        f"The evaluation set {eval_dataset!r} was asked for.",
                        "eval_dataset has no set of that name.",
                        suggest(eval_dataset, known) if known else "Pass a dict of datasets as eval_dataset.",
                    )
                )
            eval_dataset = known[eval_dataset]
        if eval_dataset is None:
            raise ConfigError(
                explain(
                    "An evaluation was asked for.", "There is no eval_dataset.", "Pass one to evaluate() or Trainer."
                )
            )
        return self._eval_loader(eval_dataset, description="evaluation")

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return this rank's test batches. Source: the documented `Trainer.get_test_dataloader`."""
        return self._eval_loader(test_dataset, description="test")

    def _eval_loader(self, dataset: Any, *, description: str) -> Any:
        self._check_columns(dataset)
        config = eval_loader_config(self.args, has_accelerator=self.strategy.device_type != "cpu")

        def make() -> Any:
            pruned, collate = self._without_unused_columns(dataset, description=description)
            return build_eval_loader(
                pruned,
                config,
                collate=collate,
                sampler=self._get_eval_sampler(dataset),
                rank=self.strategy.rank,
                world_size=self.strategy.world_size,
            )

        if not config.persistent_workers:
            return make()
        self._loaders.limit = 1 + (len(self.eval_dataset) if isinstance(self.eval_dataset, Mapping) else 1)
        return self._loaders.get((dataset, self.data_collator, self._signature_columns, config.batch_size), make)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the sampler of the training data: by length if asked for; None shuffles by seed and epoch."""
        config = self._length_config(is_training=True)
        if config is None:
            return None
        return length_sampler(self.train_dataset if train_dataset is None else train_dataset, config, is_training=True)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Return the sampler of evaluation data: from long to short if asked for; None goes through it in order."""
        config = self._length_config(is_training=False)
        if config is None:
            return None
        unit = eval_loader_config(self.args, has_accelerator=False).batch_size if self.args.dataloader_drop_last else 1
        return length_sampler(eval_dataset, config, is_training=False, world_size=self.strategy.world_size, unit=unit)

    def _length_config(self, *, is_training: bool) -> LengthConfig | None:
        size = self.get_total_train_batch_size(self.args)
        return length_config(self.args, tool=self.processing_class, batch_size=size, is_training=is_training)

    def _without_unused_columns(self, dataset: Any, *, description: str) -> tuple[Any, Callable[[list[Any]], Any]]:
        keep = self._signature_columns if self.args.remove_unused_columns else None
        if keep is None:
            return dataset, self.data_collator
        # Loudly where the user's own collator might have wanted a column.
        level = logging.WARNING if self._has_own_collator else logging.INFO
        about: dict[str, Any] = {
            "keep": keep,
            "model_name": type(self.model).__name__,
            "description": description,
            "log_level": level,
        }
        return prune_columns(dataset, **about), ColumnPruner(self.data_collator, **about)

    def _check_columns(self, dataset: Any) -> None:
        """Refuse, before anything is launched, data of which the model takes no column."""
        keep = self._signature_columns if self.args.remove_unused_columns else None
        if keep is None or not has_length(dataset) or not len(dataset) or not hasattr(dataset, "__getitem__"):
            return
        names = removable_columns(dataset)
        if names is None:
            with preserved_rng():
                sample = dataset[0]
            names = list(sample) if isinstance(sample, Mapping) else None
        inputs = [name for name in keep if name not in (*self.label_names, "label", "label_ids")]
        if names is not None and not set(names) & set(inputs):
            raise TaskError(
                explain(
                    "A dataset was given.",
                    f"Its columns ({', '.join(map(str, names))}) include none that "
                    f"{type(self.model).__name__}.forward takes ({', '.join(inputs)}).",
                    "Rename the columns, or set remove_unused_columns=False if your collator makes the inputs.",
                )
            )

    def _check_lengths(self, dataset: Any, *, is_training: bool) -> None:
        """Refuse, before anything is launched, data that cannot be ordered by length as asked for."""
        config = self._length_config(is_training=is_training)
        if config is not None:
            check_lengths(dataset, config)

    def _sharded(self, loader: Any, *, is_training: bool) -> Any:
        """Give each rank its share of a loader that an override returned whole."""
        if self.strategy.world_size == 1:
            return loader
        config = train_loader_config(self.args, has_accelerator=False)
        return shard_loader(
            loader,
            rank=self.strategy.rank,
            world_size=self.strategy.world_size,
            is_training=is_training,
            even_batches=config.even_batches,
            split_batches=config.split_batches,
            seed=config.seed,
            dispatch_batches=config.dispatch_batches,
        )

    def _check_optimizer(self) -> None:
        """Refuse, before anything is launched, an optimizer that cannot be made."""
        check_made(self)
        is_own = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        makes_own = type(self.task).configure_optimizers is not TaskModule.configure_optimizers
        is_made = "optimizer" in self.strategy.makes
        if not (is_own or makes_own or is_made or self._is_overridden("create_optimizer")):
            self.get_optimizer_cls_and_kwargs(self.args, self.model)

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
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

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
                explain(f"{asker}() was called.", "There is no optimizer yet.", "Call train() or create_optimizer().")
            )
        return self.optimizer

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def is_fsdp_enabled(self) -> bool:
        """Whether the model is split by FSDP. Source: the documented `Trainer.is_fsdp_enabled`."""
        return any(getattr(kind, "name", "") == "fsdp" for kind in type(self.strategy).__mro__)

    @property
    def is_deepspeed_enabled(self) -> bool:
        """Whether the strategy is DeepSpeed's. Source: the documented `Trainer.is_deepspeed_enabled`."""
        return any(getattr(kind, "name", "") == "deepspeed" for kind in type(self.strategy).__mro__)

    def propagate_args_to_deepspeed(self, auto_find_batch_size: bool = False) -> None:
        """Write the arguments into the DeepSpeed config.

        Source: the documented `Trainer.propagate_args_to_deepspeed`.
        """
        propagate = getattr(self.strategy, "propagate_args", None)
        if propagate is None:
            raise ConfigError(
                explain(
                    "propagate_args_to_deepspeed() was called.",
                    f"strategy={self.strategy.name!r} has no DeepSpeed config.",
                    "Pass deepspeed= in the arguments, or leave the call out.",
                )
            )
        propagate(self.args, auto_find_batch_size=auto_find_batch_size)

    def is_world_process_zero(self) -> bool:
        """Tell whether this is the one main process of all."""
        return self.strategy.rank == 0

    def is_local_process_zero(self) -> bool:
        """Tell whether this is the main process of its machine."""
        return self.strategy.local_rank == 0

    def num_examples(self, dataloader: Any) -> int:
        """Return how many samples a loader's data holds, the best estimate where it has no length."""
        return num_examples(dataloader, batch_size=self.args.train_batch_size)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples per optimizer update, all ranks together."""
        return total_batch_size(args, world_size=self.strategy.world_size)

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
                explain(
                    "model_init was given.", "It takes more than the trial.", "Let it take no argument, or the trial."
                )
            )
        takes_trial = any(p.name == "trial" or (p.default is p.empty and p.kind < p.VAR_POSITIONAL) for p in parameters)
        model = self.model_init(trial) if takes_trial else self.model_init()
        if model is None:
            raise ConfigError(
                explain("model_init() was called.", "It returned None.", "Return the model from model_init.")
            )
        return model

    # -- running -------------------------------------------------------------------------------------------------

    @contextmanager
    def _running(self, stage: str) -> Iterator[None]:
        """Launch the strategy and open the precision for as long as a verb runs."""
        previous, self._stage = self._stage, stage
        self._depth += 1
        try:
            if self._depth == 1:
                self.strategy.launch()
                self.precision.open(self.strategy.device, self.strategy.scaler_factory)
            yield
        finally:
            self._depth -= 1
            self._stage = previous
            if self._depth == 0:
                self.precision.close()

    @contextmanager
    def _evaluating(self, stage: str) -> Iterator[None]:
        """Evaluate the unwrapped model in evaluation mode, and leave modes and random numbers as they were."""
        with self._running(stage), preserved_rng():
            if self._session is None:
                self.model = self.task.model = self.precision.convert(self.model)
                place_task(self.task, self.strategy)
            wrapped, modes = self.task.model, [(module, module.training) for module in self.task.modules()]
            self.task.model = self.strategy.for_evaluation(wrapped)
            self.task.eval()
            for metric in self.task.metrics("eval").values():
                metric.reset()
            try:
                yield
            finally:
                self.strategy.after_evaluation(wrapped)
                self.task.model = wrapped
                for module, was_training in modes:
                    module.training = was_training

    def _rates(self, prefix: str, start_s: float, num_samples: int | None, loader: Any) -> dict[str, float]:
        num_steps = None
        if num_samples is not None:
            num_steps = math.ceil(num_samples / (self.args.eval_batch_size * self.strategy.world_size))
        return speed_metrics(prefix, start_s, num_samples=num_samples, num_steps=num_steps)


def _one_of(value: Any, older: Any, *, new: str, old: str) -> Any:
    """Take a value under its new or its older name."""
    if older is None:
        return value
    if value is not None:
        raise ConfigError(explain(f"{new} and {old} were given.", "They are the same thing.", f"Keep {new}."))
    warn_once(f"{old} is deprecated; use {new}.", FutureWarning)
    return older
