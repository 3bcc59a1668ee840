"""The documented Trainer: its verbs and hooks, over the objects that own state and behaviour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrain.adapter.data import total_batch_size
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks import CallbackHandler, TrainerCallback
from hftrain.callbacks.logging import RunLogger
from hftrain.checkpoint.manifest import PREFIX_CHECKPOINT_DIR
from hftrain.checkpoint.writer import SavePolicy
from hftrain.core.devices import move
from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.extras import extra
from hftrain.core.log import get_logger, warn_once
from hftrain.core.metrics import as_entry, token_speed
from hftrain.core.notes import keep_facts
from hftrain.core.signatures import Hooks
from hftrain.core.state import TrainerControl, TrainerState
from hftrain.core.tree import as_array, map_tensors
from hftrain.core.types import BestRun, EvalLoopOutput, HPSearchBackend, PredictionOutput, TrainOutput
from hftrain.data.datasets import num_examples, split_eval_sets
from hftrain.data.loaders import make_limits
from hftrain.evaluation.preparation import cast_inputs
from hftrain.loops.contract import Loop
from hftrain.optim.groups import decay_parameter_names
from hftrain.optim.optimizers import OptimizerConfig
from hftrain.precision.base import Precision
from hftrain.rules.constructor import check_hooks, check_model, check_parts, missing_attribute, refusing_unknown
from hftrain.run.best import follow_metric
from hftrain.run.build import open_run
from hftrain.run.counting import TokenCounter
from hftrain.run.run import Run
from hftrain.run.saving import capture_model, load_task, write_model
from hftrain.storage.files import existing_part
from hftrain.strategies.base import Strategy
from hftrain.task.compilation import Compiler
from hftrain.task.introspect import tensor_parallel_size
from hftrain.task.loss import LabelSmoother
from hftrain.task.model_task import CountItems, ModelTask
from hftrain.task.modes import is_on
from hftrain.task.module import TaskModule, as_step_output
from hftrain.trainer.checks import check_before_training, check_settings, check_with_model
from hftrain.trainer.choices import (
    begin_process,
    choose_backends,
    collect_callbacks,
    default_collator,
    number_of_batches,
    one_of,
    resolve_arguments,
    with_default_callbacks,
)
from hftrain.trainer.model import EngineFlag, build_model
from hftrain.trainer.parts import TrainerParts

if TYPE_CHECKING:
    from hftrain.loggers.base import Logger

logger = get_logger(__name__)


class Trainer:
    """Train, evaluate and predict with a `TaskModule` or any model, with the Hugging Face Trainer's documented API.

    Nothing is launched and no device is touched before `train`, `evaluate` or `predict` is called.

    Args:
        model: A `TaskModule`, or an `nn.Module` that returns its loss (first in a tuple, or under ``"loss"``).
        args: The documented arguments; None writes to ``tmp_trainer``.
        data_collator: Collates samples into a batch; by default pads with `processing_class` if possible, otherwise
            stacks.
        train_dataset: The training data; may be an iterable without length (then set `max_steps`).
        eval_dataset: The evaluation data; a dict holds several sets, whose names prefix their metrics. Its values are
            datasets, or `EvalSet` objects for sets with their own metrics or schedule.
        processing_class: Tokenizer or processor; pads batches and is saved with the model.
        model_init: Builds a new model at each `train()`.
        compute_loss_func: ``f(outputs, labels, num_items_in_batch=...)`` in place of the model's own loss.
        compute_metrics: ``f(EvalPrediction) -> dict``.
        callbacks: Instances or classes, added to the default ones.
        optimizers: An optimizer and a schedule to use instead of the arguments' (either may be None).
        optimizer_cls_and_kwargs: A class and its arguments, in place of `args.optim`.
        preprocess_logits_for_metrics: ``f(logits, labels) -> logits``, run before predictions are kept.
        strategy: A strategy's name or instance; takes precedence over the arguments, which must not contradict it.
        precision: A precision's name or instance, with the same rules.
        loop: Replaces the default loop of a stage: a name, a subclass of `FitLoop`, `EvaluateLoop` or `PredictLoop`, or
            an instance; or a sequence of those, one per stage.
        save_policy: When and how to save, in addition to the arguments.
        fast_dev_run: Number of steps or batches of a rehearsal; True means 1, None disables it. `train` runs the steps
            on a copy of the model, evaluates, saves and resumes in a temporary folder, logs the step time and cleans
            up. `evaluate` and `predict` run that many batches. Callbacks are called; trackers and the Hub are not.
        limit_train_batches: How many batches of each process a pass has; a `float` is a share of them (1 is one batch,
            1.0 are all). Epochs, steps and the schedule are planned with that many. Checkpoints and the report say so.
        limit_eval_batches: How many batches of each process `evaluate` reads, in the same way; not `predict`.
        overfit_batches: Like `limit_train_batches`, but every pass has the same batches in the same order. Evaluations
            read as many of theirs, unless `limit_eval_batches` says otherwise.
        sanity_eval_batches: Batches of each evaluation set that `train` evaluates before the first step, to fail early.
            It leaves no trace: no callback is called, nothing is logged, random numbers are restored.
        max_time: End the run early, after this time over all its sessions (``"2h"``, ``"1h 30min"``), or at the first
            log after so many tokens (``"1e9tok"``). The schedule stays that of the planned length.
        count_items: The items that a plain model's loss averages over: ``"labels"``, ``"shifted_labels"``,
            ``"samples"``, ``"sum"``, or a function that counts a batch's items. By default it is detected, which is not
            possible with single-sample batches of unequal length or with a custom loss.
        loggers: Names of trackers, or `Logger` instances, in place of `args.report_to`.
        profiler: ``"simple"`` prints where the time went, ``"torch"`` writes a trace of a few steps; or a callback,
            such as `TorchProfiler(active=10)`.
        flight_log: Write down the samples, losses, norm, rate, times and a fingerprint of each step, for
            `hftrain blame`; or a `FlightLog(...)`.
        exclude_samples: Indices of samples to leave out of training, or the path of a JSON list of them.
        eval_collator: Collates the samples of evaluations and predictions, in place of `data_collator`.
        tokenizer: The older name of `processing_class`.
        callback: The older guide's name of `callbacks`.

    Raises:
        ConfigError: A setting is unknown, contradicts another or has no effect here.
        TaskError: The task or model does not work as the Trainer requires.

    Source: the documented `Trainer`.
    """

    args: TrainingArguments
    task: TaskModule
    # The bare model; `model_wrapped` is the one whose forward is called.
    model: nn.Module
    model_wrapped: nn.Module
    data_collator: Callable[[list[Any]], Any]
    eval_dataset: Any
    loops: Mapping[str, Loop[Any]]
    # Number of batches of each stage in a rehearsal; 0 in a real run.
    fast_dev_run: int
    optimizer: torch.optim.Optimizer | None
    label_names: list[str]
    can_return_loss: bool
    is_model_parallel: bool
    _loss_shifts_labels: bool
    current_flos: float
    is_fsdp_enabled = EngineFlag("fsdp")
    is_deepspeed_enabled = EngineFlag("deepspeed")
    # The backend of a running search.
    hp_search_backend: HPSearchBackend | None
    # The function that names its trials.
    hp_name: Callable[[Any], str] | None = None
    loss_is_scaled_for_ga: bool | None = None

    # axolotl rewrites the source code of these two methods unless it finds their originals here. It would look for
    # lines of transformers', and run the rest in a module where hftrain's names are undefined.
    _original_evaluation_loop = _original_maybe_log_save_evaluate = ""

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
        save_policy: SavePolicy | None = None,
        fast_dev_run: bool | int | None = None,
        limit_train_batches: int | float | None = None,
        limit_eval_batches: int | float | None = None,
        overfit_batches: int | float | None = None,
        sanity_eval_batches: int | None = None,
        max_time: str | None = None,
        count_items: str | CountItems | None = None,
        loggers: str | Logger | Sequence[str | Logger] | None = None,
        profiler: str | TrainerCallback | None = None,
        flight_log: bool | TrainerCallback = False,
        exclude_samples: Any = None,
        eval_collator: Callable[[list[Any]], Any] | None = None,
        tokenizer: Any = None,
        callback: Sequence[Any] | None = None,
    ) -> None:
        initial_attributes = dict(vars(self))
        self._trainer_hooks = Hooks(self, _defined)
        self.args, self.fast_dev_run = resolve_arguments(args), number_of_batches(fast_dev_run)
        self.limits = make_limits(
            limit_train_batches=limit_train_batches,
            limit_eval_batches=limit_eval_batches,
            overfit_batches=overfit_batches,
            sanity_eval_batches=sanity_eval_batches or None,
        )
        check_model(model, model_init)
        has_own_loop = self._trainer_hooks.is_overridden("evaluation_loop")  # which may take any value for a sign
        check_parts(
            model_init=model_init,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            functions={
                **{"data_collator": data_collator, "eval_collator": eval_collator},
                "compute_metrics": None if has_own_loop else compute_metrics,
            },
        )
        self.loops = {} if loop is None else extra("own_loops").create_loops(loop)
        self.strategy, self.precision = choose_backends(self.args, model, strategy, precision, optimizers=optimizers)
        eval_dataset, eval_sets = split_eval_sets(eval_dataset)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._trainer_parts = TrainerParts(self, self._trainer_hooks, eval_sets=eval_sets, on_adopted=self._on_adopted)
        with self._trainer_parts.activity.constructing():
            self._start_idle()
            callbacks = collect_callbacks(
                self.args,
                (callbacks, callback),
                profiler=profiler,
                flight_log=flight_log,
                exclude_samples=exclude_samples,
                loggers=loggers,
                is_rehearsal=bool(self.fast_dev_run),
            )
            self.save_policy = save_policy or SavePolicy()
            settings = self, self._trainer_parts.data, self._trainer_parts.evaluation
            check_settings(*settings)
            self.model_init, self.compute_loss_func, self.count_items = model_init, compute_loss_func, count_items
            self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
            self.optimizer, self.lr_scheduler = optimizers
            self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
            self.processing_class = one_of(processing_class, tokenizer, new="processing_class", old="tokenizer")
            begin_process(self.args)
            self._trainer_parts.model.adopt(self.call_model_init() if model is None else model)
            self.data_collator = data_collator or default_collator(self.processing_class)
            self.eval_collator = eval_collator
            check_with_model(*settings)
            self._trainer_parts.steps.resolve()
            check_hooks(type(self), Trainer, defined=_DEFINED, initial=initial_attributes, attributes=vars(self))
            self._make_own_accelerator()
            self._make_callbacks(callbacks, max_time)

    # -- construction --------------------------------------------------------------------------------------------------

    def _on_adopted(self) -> None:
        """Do nothing; overridden by a Trainer that prepares a model for more."""

    if not TYPE_CHECKING:
        # Hidden from type checkers, which would otherwise accept every attribute.
        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property raised an AttributeError: raise that one again.
                return object.__getattribute__(self, name)
            raise AttributeError(missing_attribute(type(self), name, is_made="fast_dev_run" in vars(self)))

    def _make_callbacks(self, callbacks: Sequence[Any], max_time: str | None) -> None:
        if self.args.push_to_hub and not self.fast_dev_run:
            self.init_hf_repo()
        self.control = TrainerControl()
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )
        self.callback_handler = CallbackHandler(
            with_default_callbacks(self.args, self.strategy, callbacks, max_time),
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
            args=self.args,
            state=self.state,
            control=self.control,
        )
        self.callback_handler.fire("on_init_end")

    def _start_idle(self) -> None:
        """Set the attributes that only train(), evaluate() and predict() change."""
        self.compiler = Compiler.of(self.args)
        # Its pushes to the Hub, once there is one.
        self._hub_pushes: Any = None
        self.is_in_train, self.hp_search_backend, self.current_flos = False, None, 0
        # A subclass may have set these two earlier. The first are loaders with workers that persist, by their set.
        self._eval_dataloaders: dict[str, Any] = getattr(self, "_eval_dataloaders", {})
        self._signature_columns: list[str] | None = getattr(self, "_signature_columns", None)
        self.neftune_noise_alpha = self.args.neftune_noise_alpha
        self._neftune_hook: Any = None
        # The current run, once it is built.
        self._session: Run | None = None
        self._counted: tuple[nn.Module, int] | None = None
        self._created_lr_scheduler = False

    # -- training ------------------------------------------------------------------------------------------------------

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
                the same, or a new run if there is none. False starts a new run. None does too, unless the arguments say
                ``"auto"``.
            trial: An Optuna trial (its suggestions, otherwise the default space) or a dict of hyper-parameters. The
                arguments hold them during the run; requires `model_init`.
            ignore_keys_for_eval: Outputs that evaluations during training leave out of the predictions.
            **kwargs: `model_path`, the older name of `resume_from_checkpoint`.

        Returns:
            (global_step, training_loss, metrics); the loss is the mean over the run's updates.

        Raises:
            ConfigError: The settings cannot work; raised before any device is used.
            CheckpointError: There is no valid checkpoint to resume from.
            SystemExit: SIGTERM stopped the run after a checkpoint; the exit status is 128 + 15.
            KeyboardInterrupt: SIGINT stopped the run after a checkpoint.
        """
        if "model_path" in kwargs:
            warn_once("model_path is deprecated; use resume_from_checkpoint.", FutureWarning)
            resume_from_checkpoint = kwargs.pop("model_path")
        if self._trainer_parts.activity.run_parts is not None:
            raise ConfigError(
                "Cannot call train() while this Trainer trains.",
                "One Trainer runs one training at a time.",
                "Call it after the run, or use a second Trainer.",
            )
        if kwargs:
            keywords = ", ".join(sorted(kwargs))
            raise TypeError(f"train() got unexpected keyword arguments: {keywords}. Settings go to TrainingArguments.")
        if trial is not None and self._trainer_parts.trial_run is None:
            with extra("search").trial_settings(self, self._trainer_parts, self._follow_arguments, trial):
                return Trainer.train(self, resume_from_checkpoint, None, ignore_keys_for_eval)
        existing_files, parts = existing_part(self.output_dir), self._trainer_parts
        parts.activity.check_arguments()
        resume = check_before_training(
            self, parts.hooks, parts.data, parts.evaluation, parts.output, resume_from_checkpoint
        )
        run = partial(self._train_once, ignore_keys=ignore_keys_for_eval)
        if self.args.auto_find_batch_size == "smaller_batch":
            run = partial(extra("smaller_batches").with_smaller_batches, self, run)
        with parts.activity.running("train"):
            if num_batches := self.fast_dev_run:
                options = {"num_batches": num_batches, "resume": resume, "existing": existing_files}
                return extra("rehearsal").rehearse(self, parts, run, **options)  # type: ignore[no-any-return]
            return run(resume)

    def _train_once(self, resume: Path | None, *, ignore_keys: list[str] | None) -> TrainOutput:
        self.is_in_train = True
        parts = self._trainer_parts
        run_parts = parts.activity.run_parts = parts.for_run(ignore_keys)
        self.callback_handler = self.callback_handler  # whose `logger` writes into the new journal
        try:
            with open_run(run_parts, resume) as self._session:
                output = self._session.run()
                if self.args.push_to_hub:
                    self._hub.after_training()
            parts.output.publish_quietly()  # the end of the journal
            return output
        finally:
            self._session = parts.activity.run_parts = parts.computing.past = None
            self.is_in_train = False
            parts.data.close()

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Seed the random number generators and build the model with `model_init`."""
        return build_model(self.model_init, trial, seed=self.args.seed)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Return the module whose forward is called: wrapped for training, bare for evaluation. Collective.

        For training the strategy wraps the model, and the optimizer is created inside. An override may put a wrapper
        around the result only if the strategy can unwrap it (DDP, DataParallel, torch.compile).
        """
        run_parts = self._trainer_parts.activity.run_parts
        if training and run_parts is not None and run_parts.wrap is not None:
            return run_parts.wrap(model)
        return self.strategy.for_evaluation(model)

    def _running_session(self, asker: str) -> Run:
        if self._session is None:
            raise ConfigError(
                f"Cannot call {asker}() now.", "It acts on a running training.", "Call it while train() runs."
            )
        return self._session

    # -- one training step ---------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Any], int | torch.Tensor | None]:
        """Fetch a step's micro-batches and count their items.

        Args:
            num_batches: How many to fetch; fewer may remain.
            device: Where a count over ranks is summed.

        Returns:
            The batches (an empty list if none are left) and the item count (None if not needed).
        """
        batches = list(islice(epoch_iterator, num_batches))
        is_own = self._trainer_hooks.counts_items_itself
        count = self._get_num_items_in_batch if is_own else self._trainer_parts.steps.shares.count
        return batches, count(batches, device) if batches else None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device | None) -> Any:
        """Return the item count of a step's micro-batches, None if not needed."""
        return self._trainer_parts.steps.shares.count(batch_samples, device)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: int | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run forward and backward on one micro-batch.

        Args:
            model: The wrapped model.
            num_items_in_batch: Items of the whole step; None if not needed.

        Returns:
            The detached loss, scaled to its share of the step.
        """
        parts, steps = self._trainer_parts, self._trainer_parts.steps
        mode, shares = steps.mode, steps.shares
        if mode is None:
            model.train()
        elif model is not mode.model or not all(map(is_on, mode.flags)):
            mode.enter(model)
        if mode is not None and mode.train_weights is not None:
            mode.train_weights()  # schedule-free optimizers keep other weights for evaluation
        # The share of the batch as it was counted: overrides may return another batch or pop its labels.
        share = shares.share_of(inputs) if shares.is_on else None
        inputs = self._prepare_inputs(inputs)
        if share is not None:
            shares.open(inputs)
        with self.compute_loss_context_manager():
            loss: torch.Tensor = parts.hooks.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        computing = parts.computing
        try:
            weighted_loss = loss if share is None else shares.weigh(loss, share, num_items_in_batch)
            # A library may have assigned the accelerator a backward of its own, which then runs.
            if computing.accelerator is None or computing.accelerator.backward is computing.own_backward:
                computing.backward(weighted_loss)
            else:
                computing.accelerator.backward(weighted_loss)
        except Exception as error:
            keep_facts(error, loss=loss)
            raise
        return weighted_loss.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> Any:
        """Return the loss of one batch, or (loss, outputs)."""
        if isinstance(self.task, ModelTask):
            loss, outputs = self.task.compute_loss(model, inputs, num_items_in_batch)
            if self.args.past_index >= 0:
                past = extra("past_index").read_memory(outputs, self.args.past_index, has_loss=self.task.returns_loss)
                self._trainer_parts.computing.past = past
            shares = self._trainer_parts.steps.shares
            if shares.num_counted_ranks > 1 and shares.rule.watch is not None:
                loss = shares.rule.watch.undo_mean(loss, num_items_in_batch)
        else:
            result = self.task.training_step(inputs)
            if isinstance(result, torch.Tensor):
                return (result, None) if return_outputs else result
            output = as_step_output(result, step=f"{type(self.task).__name__}.training_step")
            if output.loss is None:
                raise TaskError(
                    f"Cannot train with what {type(self.task).__name__}.training_step returned:",
                    "its StepOutput holds no loss.",
                    "Return StepOutput(loss=...).",
                )
            if self._trainer_parts.steps.shares.is_on:
                self._trainer_parts.steps.items_check.see(output, inputs)
            if output.logs and self._session is not None:
                self._session.logs.add(output.logs)
            loss, outputs = output.loss, output.outputs
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context for computing the loss: the precision's autocast unless the model casts itself."""
        if self._trainer_hooks.makes_contexts:
            return self.autocast_smart_context_manager()
        return nullcontext() if self._trainer_parts.steps.cast is not None else self._trainer_parts.computing.autocast()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Return the precision's casting context.

        Args:
            cache_enabled: Keep cast weights within the context; False casts them at each use.
        """
        if cache_enabled or not self.precision.policy.autocast:
            return self._trainer_parts.computing.autocast()
        return torch.autocast(self.strategy.device_type, dtype=self.precision.policy.compute_dtype, cache_enabled=False)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Move a batch to the device, and first the model if this is called outside of a run or an evaluation."""
        if not self._trainer_parts.activity.depth:
            self._trainer_parts.activity.place_idle()
        if isinstance(inputs, (dict, Mapping)) and not inputs:
            raise TaskError(
                "A batch was made ready for the model.",
                f"It is empty: no column of the data is one that {type(self.model).__name__}.forward takes"
                + (f" ({', '.join(self._signature_columns)})." if self._signature_columns else "."),
                "Rename the columns, or set remove_unused_columns=False.",
            )
        inputs = self._prepare_input(inputs) if self._trainer_hooks.walks_inputs else self.strategy.to_device(inputs)
        computing = self._trainer_parts.computing
        if computing.past is not None:
            inputs = extra("past_index").with_memory(inputs, computing.past)
        dtype = computing.input_dtype
        return inputs if dtype is None else cast_inputs(inputs, dtype, labels=self.label_names)

    def _prepare_input(self, data: Any) -> Any:
        """Move one value to the device; an override sees every value of a nested batch."""
        if isinstance(data, Mapping):
            return type(data)({key: self._prepare_input(value) for key, value in data.items()})  # type: ignore[call-arg]
        if isinstance(data, (tuple, list)):
            values = [self._prepare_input(value) for value in data]
            return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
        return self.strategy.to_device(data)

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: Any
    ) -> tuple[Callable[[], AbstractContextManager[Any]], Any]:
        """Return a factory of the context to train a micro-batch in, and the micro-batch; called before training it."""
        return nullcontext, inputs

    def _move_model_to_device(self, model: nn.Module, device: torch.device | str) -> None:
        """Move a second model, such as a teacher; the Trainer's own is placed by its strategy."""
        move(model, torch.device(device))

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model is given `num_items_in_batch`, to divide its loss by it; a subclass may set it."""
        declared: bool | None = vars(self).get("model_accepts_loss_kwargs")
        return self._trainer_parts.model.accepts_count if declared is None else declared

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, value: bool) -> None:
        vars(self)["model_accepts_loss_kwargs"] = bool(value)

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """The number of micro-batches of the current step."""
        return self._trainer_parts.steps.shares.num_micro_batches

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, number: int) -> None:
        self._trainer_parts.steps.shares.num_micro_batches = number

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        *,
        weights: str = "average",
        ckpt: str | Path | None = None,
    ) -> dict[str, float]:
        """Run an evaluation, log its metrics and return them, each name prefixed; collective.

        Args:
            eval_dataset: A dataset, a dict of them, or the name of one of `self.eval_dataset`; None takes them all.
            ignore_keys: Outputs to leave out of the predictions.
            metric_key_prefix: Prefix of the metric names.
            weights: ``"average"`` evaluates those of an `EMA` or `SWA` callback, if there is one; ``"live"`` those that
                train.
            ckpt: ``"best"``, ``"last"`` or a checkpoint's folder: evaluate its weights, and put the present ones back.

        Returns:
            Loss (the mean over items), metrics, runtime in seconds and rates, and the epoch.
        """
        parts, evaluation = self._trainer_parts, self._trainer_parts.evaluation
        if ckpt is not None or weights != "average":
            with extra("evaluated_weights").other_weights(self, parts, ckpt, stage="eval", weights=weights):
                return Trainer.evaluate(self, eval_dataset, ignore_keys, metric_key_prefix)
        datasets = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(datasets, Mapping):
            return evaluation.over_sets(datasets, ignore_keys, metric_key_prefix, is_own=eval_dataset is None)
        eval_set = evaluation.sets.get(eval_dataset) if isinstance(eval_dataset, str) else None
        with evaluation.with_set_metrics(eval_set), parts.activity.evaluating("eval"):
            share = parts.data.eval_share(eval_dataset)
            output, metrics = evaluation.run_and_time(
                self.limits.for_evaluation(share) if self.limits.of_evaluation else share,
                description="Evaluation",
                prediction_loss_only=True if self.compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
            evaluation.warn_of_nothing(output)
            metrics = evaluation.main_metrics(metrics)
            self._trainer_hooks.log(metrics)
            metrics["epoch"] = self.state.epoch
            self.callback_handler.fire("on_evaluate", metrics=metrics)
            parts.activity.report_memory(metrics)
        return metrics

    def predict(
        self,
        test_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        *,
        weights: str = "average",
        ckpt: str | Path | None = None,
    ) -> PredictionOutput:
        """Return predictions in dataset order, with labels and metrics if the data has labels; collective.

        Args:
            test_dataset: The data to predict on; required. The others are those of `evaluate`.

        Returns:
            (predictions, label_ids, metrics); NumPy arrays or tuples of them, padded with -100 if lengths differ. A
            TaskModule's `prediction_step` returns predictions only.
        """
        if ckpt is not None or weights != "average":
            parts = self._trainer_parts
            with extra("evaluated_weights").other_weights(self, parts, ckpt, stage="predict", weights=weights):
                return Trainer.predict(self, test_dataset, ignore_keys, metric_key_prefix)
        with self._trainer_parts.activity.evaluating("predict"):
            output, metrics = self._trainer_parts.evaluation.run_and_time(
                self._trainer_parts.data.share_of(self.get_test_dataloader(test_dataset), is_training=False),
                description="Prediction",
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
            self.callback_handler.fire("on_predict", metrics=metrics)
            self._trainer_parts.activity.report_memory(metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the model over a loader of this rank's batches; shared by `evaluate` and `predict`; collective.

        Args:
            prediction_loss_only: Keep no predictions; None uses the arguments' setting.
        """
        if self._trainer_parts.activity.name == "train":
            # Called by the user, a callback or an override of `evaluate`: the model is not prepared yet.
            with self._trainer_parts.activity.evaluating("eval"):
                return self.evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
        return self._trainer_parts.evaluation.loop(
            dataloader,
            description=description,
            loss_only=self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
            finish_outputs=self._find_filler(),
        )

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return loss, outputs and labels of one batch (each may be None), without gradients."""
        evaluation = self._trainer_parts.evaluation
        return evaluation.step(model, inputs, loss_only=prediction_loss_only, ignore_keys=ignore_keys)

    def _find_filler(self) -> Callable[[Any], Any] | None:
        """Return a function to apply to the collected outputs, or None; overridden by a Trainer that generates."""
        return None

    def torch_jit_model_eval(self, model: nn.Module, dataloader: Any, training: bool = False) -> nn.Module:
        """Return the model traced with the first batch of a loader; if tracing fails, warn and return it unchanged.

        Args:
            model: In evaluation mode.
            dataloader: Its first batch is the example.
            training: True returns the model as it is.

        Source: the documented `jit_mode_eval`.
        """
        if training:
            return model
        context = self.compute_loss_context_manager
        prepare = self._prepare_inputs
        traced: nn.Module = extra("jit_mode_eval").trace_model(model, dataloader, prepare=prepare, context=context)
        return traced

    # -- between steps -------------------------------------------------------------------------------------------------

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
        """Log, evaluate and save as callbacks requested, after each step and epoch.

        The arguments give an override the progress of the run. `tr_loss` is the sum of the step losses since the last
        log. The value passed to this method is divided by the steps and logged. An override that logs itself resets
        `tr_loss` in place and sets `_globalstep_last_logged`, as the documented method does.
        """
        session = self._running_session("_maybe_log_save_evaluate")
        if self._trainer_hooks.is_overridden("_maybe_log_save_evaluate"):
            session.act_from_override(tr_loss)

    @property
    def _globalstep_last_logged(self) -> int:
        """The update after which the training loss was last logged, for overrides of `_maybe_log_save_evaluate`."""
        return self.state.global_step - (self._trainer_parts.losses.num_steps if self._trainer_parts.losses else 0)

    @_globalstep_last_logged.setter
    def _globalstep_last_logged(self, step: int) -> None:
        if self._trainer_parts.losses is not None:
            self._trainer_parts.losses.leave(self.state.global_step - step)

    @property
    def _total_loss_scalar(self) -> float:
        """The sum of all logged step losses, for overrides; `train_loss` is computed from it."""
        return self._trainer_parts.losses.run_total if self._trainer_parts.losses else 0.0

    @_total_loss_scalar.setter
    def _total_loss_scalar(self, total: float) -> None:
        if self._trainer_parts.losses is not None:
            self._trainer_parts.losses.run_total = total

    def _evaluate(
        self, trial: Any = None, ignore_keys_for_eval: list[str] | None = None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate during training, and step a schedule that depends on the metric unless `skip_scheduler` is set."""
        session, evaluation = self._running_session("_evaluate"), self._trainer_parts.evaluation
        with session.marked_as_evaluation():
            metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
            if self._trainer_hooks.is_overridden("evaluate"):  # the method itself returns rank 0's
                metrics = evaluation.main_metrics(metrics)
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if not skip_scheduler:
            has_all_sets = evaluation.has_all_sets
            follow_metric(self.lr_scheduler, self.args, self.state, metrics, has_all_sets=has_all_sets)
        return metrics

    def _determine_best_metric(self, metrics: Mapping[str, Any], trial: Any = None) -> bool:
        """Record the best evaluation so far in the state; return whether this one is the best."""
        session = self._running_session("_determine_best_metric")
        return session.contents.metric.note(metrics, has_all_sets=self._trainer_parts.evaluation.has_all_sets)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Report the objective of an evaluation during training to the search backend, which may end the trial."""
        # Evaluation sets may have different schedules, but the objective needs all of them.
        trial_run = self._trainer_parts.trial_run
        if trial_run is not None and self._trainer_parts.evaluation.has_all_sets:
            folder = self._get_output_dir(self._trainer_hooks.trial)
            trial_run.note(metrics, step=step, folder=folder, events=self.callback_handler)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add `logs` to the history and call the callbacks.

        Args:
            logs: Numbers by name; others than the Trainer's ``"epoch"`` and ``"step"`` are left out, with a warning.
            start_time: A `time.time()` value; adds the speed since then if tokens are counted
                (`include_num_input_tokens_seen`).
        """
        if self.args.include_num_input_tokens_seen:
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                num_tokens = None if self._session is None else self._session.counts.num_tokens()
                logs.update(token_speed(start_time, num_tokens))
        entry = as_entry(logs, self.state)
        self.state.log_history.append(entry)
        self._trainer_parts.journal.log(entry)
        self.callback_handler.fire("on_log", logs=logs)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of one micro-batch, as computed by the model's method of this name.

        For a transformers model without that method: 6 per non-embedding parameter and element of the main input.
        Otherwise 0. Override it to count operations in `state.total_flos`.
        """
        model = self.model
        count = getattr(model, "floating_point_ops", None)
        if callable(count):
            return count(inputs)  # type: ignore[no-any-return]
        name = getattr(model, "main_input_name", "input_ids")
        if not hasattr(model, "num_parameters") or name not in inputs:
            return 0
        if self._counted is None or self._counted[0] is not model:
            # Counted once, because it walks over all parameters.
            self._counted = model, model.num_parameters(exclude_embeddings=True)  # type: ignore[operator]
        return int(6 * inputs[name].numel() * self._counted[1])

    def store_flos(self) -> None:
        """Add the operations of all processes since the last call to `state.total_flos`; collective."""
        self.state.total_flos += sum(self.strategy.data.gather_object(float(self.current_flos)))
        self.current_flos = 0

    # -- saving and loading --------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model with the files needed to reload it; the main process writes.

        A transformers model can be reloaded with `from_pretrained`. Collective if the strategy shards the model, the
        folder is remote, or with `push_to_hub=True`; otherwise the main process may call it alone. With `push_to_hub`
        the model is also pushed from `args.output_dir`, and the call waits for the push.

        Args:
            output_dir: The folder, local or remote; None takes `args.output_dir`.

        Raises:
            CheckpointError: A remote folder cannot be written to; the files are in its local mirror.
            StrategyError: It is collective, and another process does something else.
        """
        parts = self._trainer_parts
        folder = write_model(self, parts.hooks, parts.output, output_dir, is_internal=_internal_call)
        if folder is not None and self.args.push_to_hub:
            self._hub.after_save_model(message="Model save", folder=folder)

    def _save(self, output_dir: str, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        capture_model(self, self.model, state_dict)(Path(output_dir))

    def save_state(self) -> None:
        """Write `trainer_state.json` into `output_dir`; the main process writes."""
        if self.args.should_save:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(self.output_dir / "trainer_state.json"))
            self._trainer_parts.output.publish()

    def checkpoint_objects(self) -> Mapping[str, Any]:
        """Return objects of yours to save with each checkpoint and to restore on a resume, by name.

        They need `state_dict()` and `load_state_dict()`, as optimizers, schedules, gradient scalers and modules have,
        or are tensors or random generators. A task and a callback may have this method, too. It is called at each save,
        when training has begun, and, until a resumed run has found everything, at each optimizer step: leave out what
        does not exist yet. Generators are saved for each process, the rest by the main process.

        Example:
            >>> from hftrain import Trainer
            >>> class TwoOptimizers(Trainer):
            ...     def checkpoint_objects(self):
            ...         return {"critic": self.critic_optimizer}
        """
        return {}

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Commit a checkpoint of the running session; called by the loop when callbacks request a save."""
        self._running_session("_save_checkpoint").saver.save_by_default()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the state of optimizer and schedule into a checkpoint; collective."""
        self._running_session("_save_optimizer_and_scheduler").saver.write_training(Path(output_dir))

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
        """Delete the oldest checkpoints, by commit order, beyond `save_total_limit`; called after each save."""
        self._running_session("_rotate_checkpoints").saver.rotate()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a just committed checkpoint in the background; called only with `push_to_hub`.

        An override may add files to the folder `output_dir` and call this method.
        """
        self._hub.after_save(Path(checkpoint_folder), step=self.state.global_step)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights into the model in place; called on resume and for the best model."""
        load_task(self.task, self.model, self.strategy, Path(resume_from_checkpoint), model=model)

    def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
        """Load the files of `_save_optimizer_and_scheduler`; called on resume. Collective."""
        self._running_session("_load_optimizer_and_scheduler").contents.load_training(Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random number generators from a checkpoint; called on resume, once the data is open."""
        self._running_session("_load_rng_state").contents.load_rng()

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights; called at the end of a run with `load_best_model_at_end`."""
        self._running_session("_load_best_model").saver.load_best()

    def _get_output_dir(self, trial: Any = None) -> str:
        """Return the folder for checkpoints; during a search, `output_dir` is the trial's own folder."""
        return str(self.output_dir)

    @property
    def output_dir(self) -> Path:
        """The folder of checkpoints and results; it does not depend on later changes of the working directory.

        For a remote `args.output_dir` it is the local mirror, from which they are uploaded.
        """
        return self._trainer_parts.output.folder

    # -- data ----------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return this rank's training batches."""
        return self._trainer_parts.data.train_loader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return this rank's evaluation batches.

        Args:
            eval_dataset: A dataset, or the name of one in `self.eval_dataset`; None takes `self.eval_dataset`.
        """
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        data = self._trainer_parts.data
        return data.eval_loader(data.find_eval_set(eval_dataset), "evaluation", key=key)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return this rank's test batches."""
        if test_dataset is None:
            raise ConfigError("Cannot predict:", "there is no dataset.", "Pass one: predict(test_dataset).")
        return self._trainer_parts.data.eval_loader(test_dataset, "test")

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
            sampler_fn: Takes the dataset and returns its sampler; None reads it in its own order.
            is_training: Whether all ranks get equally many batches and a stream gets epochs.
            dataloader_key: Name under which to keep the loader if its workers persist.
        """
        return self._trainer_parts.data.loader(
            dataset, description, batch_size, order=sampler_fn, is_training=is_training, key=dataloader_key
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the sampler of the training data: by length if the arguments ask for it, else shuffled.

        The order depends on seed and epoch. None for a stream.
        """
        return self._trainer_parts.data.train_sampler(self.train_dataset if train_dataset is None else train_dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Return the sampler of evaluation data: by descending length if set, else sequential; None for a stream."""
        return self._trainer_parts.data.eval_sampler(eval_dataset)

    def _set_signature_columns_if_needed(self) -> None:
        """Determine the columns to keep, unless they are known; an override sets `self._signature_columns`."""
        if self._signature_columns is None:
            self._trainer_parts.model.find_columns()

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Return a dataset without the columns that the model does not take, if it has columns."""
        return self._trainer_parts.data.prune(dataset, description or "given")

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        """Return a collator that first drops the columns that the model does not take."""
        return self._trainer_parts.data.prune_in(data_collator, description or "given")

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of samples in a loader's dataset, estimated if it has no length."""
        return num_examples(dataloader, batch_size=self.args.train_batch_size)

    def num_tokens(self, train_dl: Any, max_steps: int | None = None) -> int:
        """Return the number of input tokens in a loader by iterating over it.

        Args:
            train_dl: A loader whose batches hold the model's main input.
            max_steps: Number of batches to count, restarting the loader if needed; None counts each batch once.
        """
        counter = TokenCounter.of(self.args, self.model, self.processing_class)
        return counter.count_all(train_dl, max_batches=max_steps)

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any, total_train_batch_size: int
    ) -> tuple[int, int, int, int, bool, int | None, int]:
        """Return the run's length.

        Returns:
            (num_train_epochs, num_update_steps_per_epoch, num_examples, num_train_samples, epoch_based,
            len_dataloader, max_steps).
        """
        return self._trainer_parts.data.run_length(args, dataloader, total_train_batch_size)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples per optimizer update; processes that read the same ones count once."""
        return total_batch_size(args, world_size=self.strategy.data.world_size)

    @property
    def _train_batch_size(self) -> int:
        """Training samples per process and micro-step; setting it changes `args.per_device_train_batch_size`."""
        return self.args.train_batch_size

    @_train_batch_size.setter
    def _train_batch_size(self, value: int) -> None:
        replicas = max(self.args.train_batch_size // self.args.per_device_train_batch_size, 1)
        self.args.per_device_train_batch_size = value // replicas

    # -- optimizer and schedule ----------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create the optimizer and the schedule; override this method or either of the two it calls."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, optimizer=self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer unless it exists, and return it.

        Args:
            model: The model whose parameters it gets; None takes the Trainer's.
        """
        return self._trainer_parts.optimizers.create(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Create the schedule unless it exists, and return it."""
        if self.lr_scheduler is None:
            self._created_lr_scheduler = True
            self.lr_scheduler = self._trainer_parts.optimizers.make_schedule(num_training_steps, optimizer)
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of parameters that weight decay applies to."""
        return decay_parameter_names(model)

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Return the optimizer class and keyword arguments selected by the training arguments."""
        return OptimizerConfig.of(args).optimizer_class(model)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of every parameter group; requires an optimizer."""
        groups = self._trainer_parts.optimizers.require("get_learning_rates").param_groups
        return [float(group["lr"]) for group in groups]

    def _get_learning_rate(self) -> float:
        """Return the learning rate of the first parameter group; an override is called before the schedule's step."""
        return self.get_learning_rates()[0]

    def get_optimizer_group(self, param: str | nn.Parameter | None = None) -> Any:
        """Return the parameter group that holds `param`, or the parameters of every group; needs an optimizer."""
        if param is None:
            groups = self._trainer_parts.optimizers.require("get_optimizer_group").param_groups
            return [group["params"] for group in groups]
        return self._trainer_parts.optimizers.group_of(param)

    # -- metrics, callbacks and the Hub --------------------------------------------------------------------------------

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics as an aligned table; the main process prints."""
        if self.is_world_process_zero():
            print(extra("reports").metrics_table(split, metrics))

    def metrics_format(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return a readable copy of metrics."""
        return extra("reports").metrics_format(metrics)  # type: ignore[no-any-return]

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write ``<split>_results.json`` and add to ``all_results.json``; the main process writes."""
        if self.is_world_process_zero():
            extra("reports").store_metrics(self.output_dir, split, metrics, combined=combined)
            self._trainer_parts.output.publish()

    @property
    def callback_handler(self) -> CallbackHandler:
        """The callback handler; an assigned handler gets this Trainer's arguments, state and control."""
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
        handler.refresh(logger=RunLogger(handler, self._trainer_parts.journal.log), data_ranks=self.strategy.data)
        self._callback_handler: CallbackHandler = handler

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

    @property
    def _hub(self) -> Any:
        if self._hub_pushes is None:
            self._hub_pushes = extra("hub").TrainerHub(self, self._trainer_parts.output)
        return self._hub_pushes

    @property
    def hub_model_id(self) -> str | None:
        """The full name of the repository on the Hub, once created or found; set on the main process only."""
        return getattr(self._hub_pushes and self._hub_pushes.uploads, "repo_id", None)

    @property
    def push_in_progress(self) -> Any:
        """The future of the newest background push, possibly done; None before the first push."""
        return getattr(self._hub_pushes and self._hub_pushes.uploads, "newest", None)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create or find the repository on the Hub, on the main process.

        Args:
            token: Access token for this call; None takes `args.hub_token` or the stored login.
            private: Whether a new repository is private; None takes `args.hub_private_repo`.

        Raises:
            ConfigError: The Hub refuses the name or the token. If the Hub does not answer, only a warning is issued.
            MissingDependencyError: huggingface_hub is not installed.
        """
        self._hub.open(token=token, private=private)

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

        An existing card keeps its tags and manually written text.

        Args:
            license: License; None takes that of the base model's page on the Hub.
            model_name: Name of the model; None takes the repository's name.
            finetuned_from: The base model; None takes the name the model was loaded by.
            tasks: The Hub's names of tasks; with a dataset they make the metrics readable for the Hub.

        Raises:
            MissingDependencyError: huggingface_hub is not installed.
        """
        self._hub.write_card(**{name: value for name, value in locals().items() if name != "self"})
        self._trainer_parts.output.publish()

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model and a model card into `output_dir` and push the folder; collective, the main process pushes.

        Works without `args.push_to_hub` too. Checkpoints, optimizer states and hidden files are left out.

        Args:
            commit_message: Message of the commit.
            blocking: Wait until the push ends.
            token: Access token for this push; None takes `args.hub_token` or the stored login.
            revision: Branch for this push, created if absent; None takes `args.hub_revision`, then the main branch.
            private: Whether a new repository is private; None takes `args.hub_private_repo`.
            **kwargs: For `create_model_card`; `tags` are added to those of the model and of the card.

        Returns:
            The commit's `CommitInfo` if `blocking`, else its `Future`; None on other processes than the main one. (One
            text of the documentation has this reversed.)

        Raises:
            ConfigError: The Hub refuses the name or the token.
            MissingDependencyError: huggingface_hub is not installed.
            Exception: The push failed in huggingface_hub; with ``blocking=False`` the future holds the exception.
        """
        if self._session is not None:
            self._session.saver.writer.finish()
        return self._hub.push(
            message=commit_message, blocking=blocking, token=token, revision=revision, private=private, **kwargs
        )

    # -- processes and accelerate --------------------------------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        """Return whether this is the main process of the run."""
        return self.strategy.rank == 0

    def is_local_process_zero(self) -> bool:
        """Return whether this is the main process of its machine."""
        return self.strategy.local_rank == 0

    def get_tp_size(self) -> int:
        """Return the number of processes that each layer is split across, 1 if none."""
        return self.strategy.sizes.get("tp") or tensor_parallel_size(self.model, getattr(self.strategy, "config", None))

    def get_cp_size(self) -> int:
        """Return the number of processes that share a sequence."""
        return self.strategy.sizes.get("cp", 1)

    def get_sp_size(self) -> int:
        """Return 1, the number of processes a sequence is split over."""
        return 1

    @property
    def is_tp_enabled(self) -> bool:
        """Whether the model's layers are split over processes."""
        return self.get_tp_size() > 1

    @property
    def accelerator(self) -> Any:
        """A real `accelerate.Accelerator` that agrees with the strategy; the first use creates it and is collective.

        The loops do not use it: preparing a model or a loader with it changes neither the strategy nor the training.
        Its `backward` is the run's: with the precision's loss scaling, through the strategy's engine, and not divided
        by the accumulation steps. `sync_gradients` is whether an update follows the current micro-step.

        Using it before `train` launches the strategy. Once it exists, processes that evaluate a plain model stay in
        step, so that an override of `prediction_step` may gather: one that runs out of batches repeats its last one
        and drops the result.
        """
        if self._trainer_parts.computing.accelerator is None:
            self.create_accelerator_and_postprocess()
        return self._trainer_parts.computing.accelerator

    @accelerator.setter
    def accelerator(self, value: Any) -> None:
        # Before super().__init__() of a subclass there is no strategy to agree with; a new one is created afterwards.
        if "_trainer_parts" in vars(self):
            parts = self.args, self.strategy, self.precision, self._trainer_parts.computing
            self._trainer_parts.computing.accelerator = (
                None if value is None else extra("acceleration").adopt_accelerator(value, *parts)
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Create `accelerator` again; launches the strategy. Collective."""
        parts = self.args, self.strategy, self.precision, self._trainer_parts.computing
        self._trainer_parts.computing.accelerator = extra("acceleration").make_accelerator(*parts)

    def _make_own_accelerator(self) -> None:
        """Call an override that makes the accelerator: it may set what its class uses elsewhere."""
        if self._trainer_hooks.is_overridden("create_accelerator_and_postprocess"):
            self.create_accelerator_and_postprocess()

    @property
    def gather_function(self) -> Callable[..., Any]:
        """The function that gathers predictions: accelerate's `gather_for_metrics`.

        Evaluations contain no sample twice, so plain `gather` returns the same; no other function can be set.
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

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Concatenate the tensors of all data ranks, nesting kept; also used to average the logged loss. Collective."""
        return map_tensors(tensors, self.strategy.data.gather)

    @property
    def deepspeed(self) -> Any:
        """The DeepSpeed engine during a run that uses one, otherwise None."""
        return self.model_wrapped if self.is_deepspeed_enabled and self.model_wrapped is not self.model else None

    @deepspeed.setter
    def deepspeed(self, value: Any) -> None:
        if value is not None and value is not self.model_wrapped:
            raise ConfigError(
                "Cannot take an assigned trainer.deepspeed:",
                "The strategy makes the engine and trains with it.",
                "Pass strategy=DeepSpeedStrategy(...), or set args.deepspeed.",
            )

    def propagate_args_to_deepspeed(self, auto_find_batch_size: bool = False) -> None:
        """Write the arguments into the DeepSpeed config."""
        propagate = getattr(self.strategy, "propagate_args", None)
        if not self.is_deepspeed_enabled or propagate is None:
            raise ConfigError(
                "Cannot run propagate_args_to_deepspeed().",
                f"strategy={self.strategy.name!r} has no DeepSpeed config.",
                "Pass deepspeed= in the arguments, or leave the call out.",
            )
        propagate(self.args, auto_find_batch_size=auto_find_batch_size)

    @property
    def place_model_on_device(self) -> bool:
        """Whether the Trainer moves the model to the device; False for a split model and with DeepSpeed."""
        is_left_alone = self.is_model_parallel or self.is_deepspeed_enabled
        return bool(self.strategy.place_model and self.args.place_model_on_device and not is_left_alone)

    # -- search and rehearsal ------------------------------------------------------------------------------------------

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
        """Search hyper-parameters by repeated training, and return the best run; collective.

        Each trial builds a new model with `model_init` and writes to its own subfolder of `output_dir`. The arguments
        hold the trial's values while it runs and are restored afterwards. Evaluations during training are reported to
        the backend, which may prune the trial. The objective is that of the trial's final model.

        Args:
            hp_space: Takes the trial and returns values by setting (Optuna) or the space (Ray Tune, wandb). By
                default learning rate 1e-6 to 1e-4, 1 to 5 epochs, seed 1 to 40, batch size 4 to 64.
            compute_objective: Takes an evaluation's metrics and returns a number, or one per direction; by default the
                sum of the metrics other than the loss, or the loss if there are none. A search that minimizes warns
                of metrics, and takes the loss of a `TaskModule`.
            n_trials: How many trials to run.
            direction: "minimize" or "maximize"; a list for several objectives (Optuna).
            backend: "optuna", "ray" or "wandb"; by default the first of them that is installed.
            hp_name: Takes the trial and returns its name, also used for its folder; by default ``run-<id>``.
            **kwargs: For `optuna.create_study` and `Study.optimize`, for `ray.tune.run`, or for the sweep (`sweep_id`,
                `project`, `entity`, `name`, `metric`).

        Returns:
            The best run; with several directions, the Pareto-optimal runs.

        Raises:
            ConfigError: `model_init` or the evaluation data is missing, a value is invalid, or no trial finished.
            MissingDependencyError: The backend is not installed.
        """
        return extra("search").search_trials(  # type: ignore[no-any-return]
            self,
            self._trainer_parts,
            self._follow_arguments,
            space=hp_space,
            compute_objective=compute_objective,
            num_trials=n_trials,
            direction=direction,
            backend=backend,
            hp_name=hp_name,
            options=kwargs,
        )

    def _follow_arguments(self) -> None:
        """Update objects that were made from the arguments, after these have changed."""
        self._trainer_parts.computing.accelerator = None
        self._make_own_accelerator()
        if self.is_deepspeed_enabled:
            self.propagate_args_to_deepspeed()

    @property
    def tune(self) -> Any:
        """A `Tuner`, which finds a learning rate, a batch size and loader workers: ``trainer.tune.lr().suggestion``."""
        return extra("tuner").Tuner(self, self._trainer_parts, type(self).train)

    # -- the model -----------------------------------------------------------------------------------------------------

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
        return self._loss_function

    @compute_loss_func.setter
    def compute_loss_func(self, function: Any) -> None:
        self._loss_function = function
        task = vars(self).get("task")
        if isinstance(task, ModelTask):
            task.use_loss(function)

    @property
    def label_smoother(self) -> LabelSmoother | None:
        """The label smoother of the training; None without `label_smoothing_factor`."""
        return LabelSmoother(self.args.label_smoothing_factor) if self.args.label_smoothing_factor else None

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trainable parameters."""
        return self.strategy.count_trainable(self.model)

    def _align_special_tokens(self) -> None:
        """Copy the tokenizer's special tokens to the model's configurations before training; warn about changes."""
        self._trainer_parts.model.align_special_tokens()

    def _activate_neftune(self, model: nn.Module) -> nn.Module:
        """Add NEFTune's noise to the embeddings of `model`, until `_deactivate_neftune`; mutates the model."""
        assert self.neftune_noise_alpha is not None
        noise = extra("neftune")
        embeddings = noise.find_embeddings(self.strategy.unwrap(model))
        self._neftune_hook = noise.add_noise(embeddings, self.neftune_noise_alpha)
        return model

    def _deactivate_neftune(self, model: nn.Module) -> None:
        """Remove the noise; safe to call twice."""
        if self._neftune_hook is not None:
            self._neftune_hook.remove()
        self._neftune_hook = None

    # -- names that only copied code uses ------------------------------------------------------------------------------

    use_apex = use_cpu_amp = use_cuda_amp = use_amp = do_grad_scaling = False
    is_fsdp_xla_enabled = is_fsdp_xla_v1_enabled = is_fsdp_xla_v2_enabled = False
    is_distributed_loading_by_transformers = _loggers_initialized = False
    sharded_ddp = fsdp = scaler = _past = None

    @property
    def _memory_tracker(self) -> Any:
        """Adds the memory report; evaluate() and predict() do it themselves."""
        make = extra("memory").MemoryTracker
        return self._trainer_parts.memory or make(is_on=False, is_main=False, device_type="cpu")

    @property
    def neftune_hook_handle(self) -> Any:
        """The hook that adds NEFTune's noise during a run."""
        return self._neftune_hook

    def _save_rng_state(self, output_dir: str) -> None:
        """Write this process's random numbers and its position in the data, for an own `_save_checkpoint`."""
        self._running_session("_save_rng_state").saver.write_rank_state(Path(output_dir))

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: `_save_optimizer_and_scheduler` writes the loss scale."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: `_load_optimizer_and_scheduler` reads the loss scale."""

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn about the keys that `load_state_dict` reported."""
        for problem in ("missing", "unexpected"):
            if keys := getattr(load_result, f"{problem}_keys"):
                logger.warning("There were %s keys in the checkpoint model loaded: %s.", problem, keys)

    def _sorted_checkpoints(
        self, output_dir: str | None = None, checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR, use_mtime: bool = False
    ) -> list[str]:
        """List the checkpoints of a folder, oldest first; the best one is never the first to delete."""
        folder = self.output_dir if output_dir is None else Path(output_dir)
        prefix = f"{checkpoint_prefix}-"
        steps = {path: path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*") if path.is_dir()}
        folders = [path for path, step in steps.items() if step.isdigit()]
        folders.sort(key=lambda path: path.stat().st_mtime if use_mtime else int(steps[path]))
        best = folder / Path(self.state.best_model_checkpoint or "").name
        if best in folders[:-2]:
            folders.remove(best)
            folders.insert(-1, best)
        return [str(path) for path in folders]

    def _pad_across_processes(self, tensor: Any, pad_index: int = -100) -> Any:
        """Pad tensors to the longest of all processes along their second dimension. Collective."""
        return self.accelerator.pad_across_processes(tensor, dim=1, pad_index=pad_index)

    def _gather_and_numpify(self, tensors: Any, name: str | None = None) -> Any:
        """Concatenate the tensors of all processes, as NumPy arrays. Collective."""
        return map_tensors(self._nested_gather(tensors, name), as_array)


# The class as it is here: libraries also replace its methods (`Trainer.compute_loss = ...`) instead of overriding them.
_DEFINED = {name: getattr(Trainer, name) for name in dir(Trainer)}


def _defined() -> dict[str, Any]:
    return _DEFINED
