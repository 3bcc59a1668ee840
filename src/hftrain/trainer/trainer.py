"""The documented Trainer: methods that delegate, and hooks that the loops call through the instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrain.adapter.configs import compile_config
from hftrain.adapter.deepspeed import settle_deepspeed
from hftrain.adapter.loggers import tracker_callbacks, trackers_asked
from hftrain.adapter.precision import precision_request
from hftrain.adapter.sharing import non_blocking_copies, settle_sharing
from hftrain.adapter.strategy import forget_devices, note_devices, strategy_request
from hftrain.arguments.settle import settle
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks import CallbackHandler, DefaultFlowCallback, TrainerCallback, progress_callback
from hftrain.callbacks.checks import as_list
from hftrain.checkpoint.policy import SavePolicy
from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger, get_verbosity, set_verbosity, warn_once
from hftrain.core.progress import TrainerControl
from hftrain.core.seed import enable_full_determinism, set_seed
from hftrain.core.signatures import in_context, taking
from hftrain.core.types import TrainOutput
from hftrain.data.collators import DataCollatorWithPadding, default_data_collator
from hftrain.data.eval_sets import split_eval_sets
from hftrain.data.persistent import LoaderCache
from hftrain.loggers.base import Logger
from hftrain.loops.contract import Loop
from hftrain.loops.registry import create_loops
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions
from hftrain.rules.hooks import check_hooks, missing_attribute
from hftrain.rules.optimizer import check_optimizer
from hftrain.rules.parts import check_arguments, check_model, check_packing, check_parts, refusing_unknown
from hftrain.rules.strategy import check_local_rank, check_strategy
from hftrain.rules.task import check_unused_by_task
from hftrain.run.build import open_run
from hftrain.run.journal import Journal
from hftrain.run.output import Output
from hftrain.search.config import BestRun, HPSearchBackend, SearchConfig, check_directions, choose_backend
from hftrain.step.computing import Computing
from hftrain.step.legality import check_legal
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import create_strategy
from hftrain.task.compilation import Compiler
from hftrain.task.introspect import is_recomputing
from hftrain.task.model_task import CountItems
from hftrain.task.module import TaskModule
from hftrain.trainer.copied_names import CopiedNames
from hftrain.trainer.debugging import debug_callbacks
from hftrain.trainer.estimating import MemoryEstimate, estimate_memory
from hftrain.trainer.hub import TrainerHub
from hftrain.trainer.memory import MemoryTracker, measuring_init
from hftrain.trainer.micro_batches import SMALLER_BATCH, with_smaller_batches
from hftrain.trainer.rehearsal import existing_part, number_of_batches, rehearse, without_trackers
from hftrain.trainer.searching import SPACES, check_search, default_objective, search

logger = get_logger(__name__)


class Trainer(CopiedNames):
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
        spill_dir: A folder for predictions larger than memory: they are stored there in unnamed files that are mapped
            into memory as NumPy arrays. Deleting an array frees its file.
        save_policy: When and how to save, in addition to the arguments.
        fast_dev_run: Number of steps or batches of a rehearsal; True means 1, None disables it. `train` runs the steps
            on a copy of the model, evaluates, saves and resumes in a temporary folder, logs the step time and cleans
            up. `evaluate` and `predict` run that many batches. Callbacks are called; trackers and the Hub are not.
        count_items: The items that a plain model's loss averages over: ``"labels"``, ``"shifted_labels"``,
            ``"samples"``, ``"sum"``, or a function that counts a batch's items. By default it is detected, which is not
            possible with single-sample batches of unequal length or with a custom loss.
        loggers: Names of trackers, or `Logger` instances, in place of `args.report_to`.
        tokenizer: The older name of `processing_class`.
        callback: The older guide's name of `callbacks`.

    Raises:
        ConfigError: A setting is unknown, contradicts another or has no effect here.
        TaskError: The task or model does not work as the Trainer requires.

    Source: the documented `Trainer`.
    """

    # axolotl rewrites the source code of these two methods unless it finds their originals here. It would look for
    # lines of transformers', and run the rest in a module where hftrain's names are undefined.
    _original_evaluation_loop = _original_maybe_log_save_evaluate = ""

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
        has_own_loop = self._is_overridden("evaluation_loop")  # which may take any value for a sign
        check_parts(
            model_init=model_init,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            functions={"data_collator": data_collator, "compute_metrics": None if has_own_loop else compute_metrics},
        )
        self.loops = create_loops(loop)
        self._make_parts(model, strategy, precision, optimizers)
        callbacks = self._with_trackers(loggers, [*as_list(callbacks), *as_list(callback)])
        self.save_policy = save_policy or SavePolicy()
        eval_dataset, self._eval_sets = split_eval_sets(eval_dataset)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.spill_dir = None if spill_dir is None else Path(spill_dir).absolute()
        self._check_eval_data()
        self.model_init, self.compute_loss_func, self.count_items = model_init, compute_loss_func, count_items
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.processing_class = _one_of(processing_class, tokenizer, new="processing_class", old="tokenizer")
        self._start_idle()
        self._take_model(model)
        check_packing(self.args, self.task, data_collator)
        check_unused_by_task(self.args, self.task, compute_loss_func=compute_loss_func, count_items=count_items)
        self._check_evaluating()
        self.data_collator = data_collator or self._default_collator()
        self._resolve_hooks(given)
        self._make_own_accelerator()
        self._make_callbacks([*debug_callbacks(self.args, self.strategy), *callbacks])

    def _take_model(self, model: Any) -> None:
        """Adopt the model; if it is not given, build it after seeding."""
        if (self.args.log_level if self.args.should_log else self.args.log_level_replica) != "passive":
            set_verbosity(self.args.get_process_log_level())
        (enable_full_determinism if self.args.full_determinism else set_seed)(self.args.seed)
        self._adopt_model(self.call_model_init() if model is None else model)
        if self.optimizer is not None and self.model_init is None:
            check_optimizer(self.optimizer, self.lr_scheduler, self.model)

    def _make_parts(
        self,
        model: Any,
        strategy: str | Strategy | None,
        precision: str | Precision | None,
        optimizers: tuple[Any, Any],
    ) -> None:
        """Choose strategy and precision and raise for settings that cannot work; nothing is launched."""
        is_checkpointing = self.args.gradient_checkpointing or is_recomputing(model)
        forget_devices(self.args, model)
        name, options = strategy_request(
            self.args, strategy, is_checkpointing=bool(is_checkpointing), is_task=isinstance(model, TaskModule)
        )
        precision_name, precision_options = precision_request(self.args, precision)
        self.strategy = strategy if isinstance(strategy, Strategy) else create_strategy(name, **options)
        self.precision = (
            precision if isinstance(precision, Precision) else precisions.create(precision_name, **precision_options)
        )
        note_devices(self.args, self.strategy)
        settle_deepspeed(self.args, self.strategy, self.precision)
        check_strategy(self.args, self.strategy, optimizers=optimizers)
        check_legal(self.strategy, self.precision)
        self.strategy.non_blocking = non_blocking_copies(self.args)
        self._memory = MemoryTracker(
            is_on=not self.args.skip_memory_metrics,
            is_main=self.strategy.is_main,
            device_type=self.strategy.device_type,
        )
        self._memory.start("init")
        self.compiler = Compiler(compile_config(self.args))
        self._computing = Computing(self.precision.backward, self.precision.autocast)

    def _with_trackers(self, loggers: Any, callbacks: Sequence[Any]) -> list[Any]:
        """Return the callbacks of the chosen trackers, followed by the user's; no tracker is started."""
        trackers = trackers_asked(self.args, loggers)
        if loggers is None:
            self.args.report_to = [str(name) for name in trackers]
        callbacks = [*tracker_callbacks(trackers, besides=callbacks), *callbacks]
        return without_trackers(callbacks) if self.fast_dev_run else callbacks

    def _default_collator(self) -> Callable[[list[Any]], Any]:
        tool = self.processing_class
        pads = hasattr(tool, "pad") and (hasattr(tool, "pad_token_id") or hasattr(tool, "padding_value"))
        return DataCollatorWithPadding(tool) if pads else default_data_collator

    def _resolve_hooks(self, given: Mapping[str, Any]) -> None:
        """Inspect the hooks' signatures once, so that overrides in the older forms keep working."""
        # Stored under names that no subclass would choose for its own methods.
        self._slot_compute_loss = taking(self.compute_loss, 3, "num_items_in_batch")
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

    def _is_overridden(self, name: str) -> bool:
        return name in vars(self) or getattr(type(self), name) is not getattr(Trainer, name)

    if not TYPE_CHECKING:
        # Hidden from type checkers, which would otherwise accept every attribute.
        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property raised an AttributeError: raise that one again.
                return object.__getattribute__(self, name)
            raise AttributeError(missing_attribute(type(self), name, is_made="args" in vars(self)))

    def _start_idle(self) -> None:
        """Set the attributes that only train(), evaluate() and predict() change."""
        self._output = Output(lambda: self.args.output_dir, self.strategy)
        self._journal = Journal()
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
        self.hp_search_backend = None
        # A subclass may have set these two earlier.
        self._eval_dataloaders = getattr(self, "_eval_dataloaders", {})
        self._signature_columns = getattr(self, "_signature_columns", None)
        self._found, self._eval_logs = {}, {}
        self.neftune_noise_alpha, self._neftune_hook = self.args.neftune_noise_alpha, None
        self._trial_run = self._training_mode = self._loss_window = self._counted = None
        self._cast = self._eval_mean = None
        self._session = self._run_parts = self._strategy_wrap = self._used_rate = None
        self._loaders = LoaderCache(limit=1)
        self._depth, self._stage, self._num_estimated, self._is_prepared = 0, "train", 0, False
        self.current_flos = 0
        self._created_lr_scheduler = self._optimizer_is_the_tasks = False

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

        Source: the documented `Trainer.train`.
        """
        if "model_path" in kwargs:
            warn_once("model_path is deprecated; use resume_from_checkpoint.", FutureWarning)
            resume_from_checkpoint = kwargs.pop("model_path")
        if self._run_parts is not None:
            raise ConfigError(
                "Cannot call train() while this Trainer trains.",
                "One Trainer runs one training at a time.",
                "Call it after the run, or use a second Trainer.",
            )
        if kwargs:
            names = ", ".join(sorted(kwargs))
            raise TypeError(f"train() got unexpected keyword arguments: {names}. Settings go to TrainingArguments.")
        if trial is not None and self._trial_run is None:
            with self._trying(trial):
                return Trainer.train(self, resume_from_checkpoint, None, ignore_keys_for_eval)
        found = existing_part(self.output_dir)
        resume = self._check_training(resume_from_checkpoint)

        def run(resume: Path | None) -> TrainOutput:
            parts = self.optimizer, self.lr_scheduler

            def attempt() -> TrainOutput:
                self.optimizer, self.lr_scheduler = parts
                return self._train_once(resume, ignore_keys_for_eval)

            is_retried = self.args.auto_find_batch_size == SMALLER_BATCH
            return with_smaller_batches(self.args, self.strategy, resume, attempt) if is_retried else attempt()

        with self._running("train"):
            if num_batches := self._num_rehearsed:
                size = self.get_total_train_batch_size(self.args)
                parts = self.args, self.strategy, self.output_dir
                return rehearse(
                    run, self._copies, *parts, num_batches=num_batches, size=size, resume=resume, found=found
                )
            return run(resume)

    def _train_once(self, resume: Path | None, ignore_keys: list[str] | None) -> TrainOutput:
        """Build a run, execute it and close it."""
        self.is_in_train = True
        self._run_parts = self._make_run_parts(ignore_keys)
        try:
            with open_run(self._run_parts, self._make_run_hooks(), resume) as self._session:
                output = self._session.run()
            self._output.publish_quietly()  # the end of the journal
            return output
        finally:
            self._session = self._run_parts = self._computing.past = None
            self.is_in_train = False
            self._loaders.clear()
            self._eval_dataloaders.clear()

    def estimate_memory(self) -> MemoryEstimate:
        """Return the peak device memory of a training step in this process; collective.

        Rehearses three steps like `fast_dev_run=3` with the chosen strategy and precision, and cleans up. Memory
        reserved by a caching allocator is not included.

        Raises:
            ConfigError: torch does not report peak memory for the engine or device (DeepSpeed, XLA, MPS).

        Units:
            bytes.
        """
        return estimate_memory(
            self.strategy, self.precision, rehearse=self._estimate, read_wrapped=lambda: self.model_wrapped
        )

    def _estimate(self, num_batches: int, watch: TrainerCallback) -> None:
        """Rehearse `num_batches` steps for an estimate, with an extra callback."""
        self._num_estimated = num_batches
        self.add_callback(watch)
        try:
            type(self).train(self)
        finally:
            self._num_estimated = 0
            self.remove_callback(watch)

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

        Source: the documented `Trainer.hyperparameter_search`.
        """
        has_data = self.eval_dataset is not None or any(map(self._is_overridden, ("get_eval_dataloader", "evaluate")))
        check_search(self.model_init, fast_dev_run=self.fast_dev_run, has_data=has_data)
        chosen = self.hp_search_backend = choose_backend(backend)
        try:
            config = SearchConfig(
                space=hp_space or SPACES[chosen],
                num_trials=n_trials,
                directions=check_directions(direction, chosen),
                options=kwargs,
                scope=self.args.ray_scope or "last",
            )
            objective = compute_objective or default_objective(self.task, config)
            attempt = partial(self._attempt, compute_objective=objective, directions=config.directions, hp_name=hp_name)
            # Each trial creates its own, and Ray's processes must not receive these.
            self.accelerator = None
            evaluates, handler = self.args.eval_strategy != "no", self.callback_handler
            return search(config, chosen, attempt, strategy=self.strategy, handler=handler, evaluates=evaluates)
        finally:
            self.hp_search_backend = None

    def _attempt(self, trial: Any, *, directions: Sequence[str], resume: str | None = None, **options: Any) -> Any:
        """Train and evaluate once, and return the objective or objectives; collective."""
        with self._trying(trial, **options) as run:
            self.train(resume_from_checkpoint=resume, trial=trial)
            if run.step != self.state.global_step or self.args.load_best_model_at_end:
                # The trial's final model has not been evaluated.
                run.values = run.compute_objective(dict(self.evaluate()))
            return run.objectives(len(directions))


def _settled(args: TrainingArguments | None) -> TrainingArguments:
    """Check the arguments and fill in dependent values; None means the defaults, with a folder in the working one."""
    args = TrainingArguments("tmp_trainer") if args is None else args
    check_arguments(args)
    settle(args)
    settle_sharing(args)
    check_local_rank(args)
    return args


def _one_of(value: Any, older: Any, *, new: str, old: str) -> Any:
    """Return a value that was passed under its new or its older name."""
    if older is None:
        return value
    if value is not None:
        raise ConfigError(f"Cannot use both {new} and {old}:", "they are two names of one argument.", f"Keep {new}.")
    warn_once(f"{old} is deprecated; use {new}.", FutureWarning)
    return older
