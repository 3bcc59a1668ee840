"""The documented attributes of a Trainer, and simple methods that read them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrain.adapter.data import total_batch_size
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks import CallbackHandler, TrainerCallback
from hftrain.checkpoint.policy import SavePolicy
from hftrain.core.errors import ConfigError
from hftrain.core.log import warn_once
from hftrain.core.progress import TrainerControl
from hftrain.core.seed import set_seed
from hftrain.core.signatures import takes_trial
from hftrain.core.state import TrainerState
from hftrain.data.eval_sets import EvalSet
from hftrain.data.persistent import LoaderCache
from hftrain.loops.contract import Loop
from hftrain.loops.window import LossWindow
from hftrain.precision.base import Precision
from hftrain.rules.optimizer import check_optimizer
from hftrain.rules.task import check_not_lightning, check_task
from hftrain.run.journal import Journal
from hftrain.run.output import Output
from hftrain.run.parts import RunParts
from hftrain.run.run import Run
from hftrain.search.config import HPSearchBackend
from hftrain.step.computing import Computing
from hftrain.strategies.base import EngineFlag, Strategy
from hftrain.task.compilation import Compiler
from hftrain.task.introspect import base_model, is_spread, tensor_parallel_size
from hftrain.task.items import counts_shifted_labels, loss_shifts_labels
from hftrain.task.loss import LabelSmoother
from hftrain.task.model_call import ModelCall
from hftrain.task.model_task import CountItems, ModelTask
from hftrain.task.modes import TrainingMode
from hftrain.task.module import TaskModule
from hftrain.trainer.acceleration import adopt_accelerator, make_accelerator
from hftrain.trainer.evaluation_mean import EvaluationMean
from hftrain.trainer.hub import TrainerHub
from hftrain.trainer.items_check import ItemsCheck
from hftrain.trainer.memory import MemoryTracker
from hftrain.trainer.numerics import prepare_model
from hftrain.trainer.searching import TrialRun
from hftrain.trainer.weighing import LossShares


class TrainerFields:
    """Hold the attributes of a `Trainer`, which its constructor sets."""

    args: TrainingArguments
    task: TaskModule
    # The bare model; `model_wrapped` is the one whose forward is called.
    model: nn.Module
    model_wrapped: nn.Module
    strategy: Strategy
    precision: Precision
    loops: Mapping[str, Loop[Any]]
    save_policy: SavePolicy
    compiler: Compiler
    model_init: Callable[..., nn.Module] | None
    count_items: str | CountItems | None
    compute_metrics: Callable[..., dict[str, Any]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    data_collator: Callable[[list[Any]], Any]
    processing_class: Any
    train_dataset: Any
    eval_dataset: Any
    spill_dir: Path | None
    # Number of batches of each stage in a rehearsal; 0 in a real run.
    fast_dev_run: int
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None
    state: TrainerState
    control: TrainerControl
    label_names: list[str]
    can_return_loss: bool
    is_model_parallel: bool
    is_in_train: bool
    neftune_noise_alpha: float | None
    current_flos: float
    is_fsdp_enabled = EngineFlag("fsdp")
    is_deepspeed_enabled = EngineFlag("deepspeed")
    # The backend of a running search.
    hp_search_backend: HPSearchBackend | None
    # The function that names its trials.
    hp_name: Callable[[Any], str] | None = None

    _output: Output
    _journal: Journal
    _hub: TrainerHub
    _memory: MemoryTracker
    _computing: Computing
    # The call of a model that runs under autocast itself, until the end of train(), evaluate() or predict().
    _cast: ModelCall | None
    _shares: LossShares
    _items_check: ItemsCheck
    # Set during an evaluation of a plain model.
    _eval_mean: EvaluationMean | None
    _loaders: LoaderCache
    _eval_sets: dict[str, EvalSet]
    # Evaluation loaders whose workers persist, by the name of their set.
    _eval_dataloaders: dict[str, Any]
    _eval_logs: Mapping[str, Any]
    _loss_shifts_labels: bool
    # The documented `model_accepts_loss_kwargs`: as found, and as set by user code.
    _accepts_found: bool
    _accepts_declared: bool | None = None
    _signature_columns: list[str] | None
    _found: dict[str, Any]
    _neftune_hook: Any
    # The user's wrapper around the model, if any, else the model.
    _outermost: nn.Module
    # The current run, once it is built, and its parts, which exist earlier.
    _session: Run | None
    _run_parts: RunParts | None
    # Set while a run calls hooks: how the base `_wrap_model` wraps, and what the base `_get_learning_rate` returns.
    _strategy_wrap: Callable[[nn.Module], nn.Module] | None
    _used_rate: float | None
    # The current trial of a search, with its results.
    _trial_run: TrialRun | None
    # Number of batches of a running memory estimate.
    _num_estimated: int
    # Whether the precision has been prepared for steps outside of these calls.
    _is_prepared: bool
    # Nesting depth of running train(), evaluate() and predict() calls, and the stage of the innermost.
    _depth: int
    _stage: str
    _counted: tuple[nn.Module, int] | None
    # Kept after a run, for scripts that read the logged values.
    _loss_window: LossWindow | None
    # Set during a run.
    _training_mode: TrainingMode | None
    # Set by an override of create_scheduler too.
    _created_lr_scheduler: bool
    _optimizer_is_the_tasks: bool
    # Results of inspecting the hooks at the start of train(), evaluate() or predict(); see `Trainer._resolve_hooks`.
    _slot_compute_loss: Callable[..., Any]
    _slot_training_step: Callable[..., Any]
    _slot_get_batch_samples: Callable[..., Any]
    _slot_log: Callable[..., Any]
    _walks_inputs: bool
    _counts_items_itself: bool
    _makes_contexts: bool

    if TYPE_CHECKING:

        def _is_overridden(self, name: str) -> bool:
            """Return whether a subclass or this instance overrides a hook; defined in `Trainer`."""

        def _resolve_hooks(self, given: Mapping[str, Any]) -> None:
            """Inspect the hooks' signatures; defined in `Trainer`."""

    def _adopt_model(self, model: nn.Module) -> None:
        """Set the model to train; a plain module is put into a `ModelTask`."""
        bare = self.strategy.unwrap(model)
        check_not_lightning(bare)
        if isinstance(bare, TaskModule):
            self.task = bare
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
        self.model = self.strategy.unwrap(self.task.model)
        self.task.model = self.model
        # If the user wrapped the model, the forward pass goes through that wrapper.
        self.model_wrapped = model
        self._outermost = model
        self.is_model_parallel = is_spread(self.model)
        self.strategy.place_model = bool(self.place_model_on_device)
        prepare_model(self.args, self.strategy, self.model, noise_alpha=self.neftune_noise_alpha)
        plain = self.task if isinstance(self.task, ModelTask) else None
        self._items_check = ItemsCheck(self.task)
        self._find("label_names", list(plain.label_names) if plain else ["labels"])
        self._find("can_return_loss", plain.can_return_loss if plain else False)
        self._accepts_found = plain is not None and plain.accepts_item_count
        self._find("_loss_shifts_labels", counts_shifted_labels() and loss_shifts_labels(base_model(self.model)))
        self._find("_signature_columns", None)
        if self.optimizer is not None and self.model_init is None:
            check_optimizer(self.optimizer, self.lr_scheduler, self.model)

    def _find(self, name: str, value: Any) -> None:
        """Set a detected property of the model, unless a subclass declares it or has set another value since."""
        if hasattr(type(self), name):
            return
        if name not in vars(self) or vars(self)[name] == self._found.get(name):
            setattr(self, name, value)
            self._found[name] = value

    def _new_state(self) -> TrainerState:
        return TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )

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
        """The folder of checkpoints and results; it does not depend on later changes of the working directory.

        For a remote `args.output_dir` it is the local mirror, from which they are uploaded.
        """
        return self._output.folder

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
        self._callback_handler = handler

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

    @property
    def _train_batch_size(self) -> int:
        """Training samples per process and micro-step; setting it changes `args.per_device_train_batch_size`."""
        return self.args.train_batch_size

    @_train_batch_size.setter
    def _train_batch_size(self, value: int) -> None:
        replicas = max(self.args.train_batch_size // self.args.per_device_train_batch_size, 1)
        self.args.per_device_train_batch_size = value // replicas

    @property
    def place_model_on_device(self) -> bool:
        """Whether the Trainer moves the model to the device; False for a split model and with DeepSpeed."""
        is_left_alone = self.is_model_parallel or self.is_deepspeed_enabled
        return bool(self.strategy.place_model and self.args.place_model_on_device and not is_left_alone)

    @property
    def is_tp_enabled(self) -> bool:
        """Whether the model's layers are split over processes."""
        return self.get_tp_size() > 1

    @property
    def label_smoother(self) -> LabelSmoother | None:
        """The label smoother of the training; None without `label_smoothing_factor`."""
        return LabelSmoother(self.args.label_smoothing_factor) if self.args.label_smoothing_factor else None

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
        if self._computing.accelerator is None:
            self.create_accelerator_and_postprocess()
        return self._computing.accelerator

    @accelerator.setter
    def accelerator(self, value: Any) -> None:
        # Before super().__init__() of a subclass there is no strategy to agree with; a new one is created afterwards.
        if "strategy" in vars(self):
            parts = self.args, self.strategy, self.precision, self._computing
            self._computing.accelerator = None if value is None else adopt_accelerator(value, *parts)

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

    @property
    def _num_rehearsed(self) -> int:
        """The number of batches of each stage in a rehearsal, 0 in a real run."""
        return self._num_estimated or int(self.fast_dev_run)

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

    def _running_session(self, asker: str) -> Run:
        if self._session is None:
            raise ConfigError(
                f"Cannot call {asker}() now.", "It acts on a running training.", "Call it while train() runs."
            )
        return self._session

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trainable parameters."""
        return self.strategy.count_trainable(self.model)

    def is_world_process_zero(self) -> bool:
        """Return whether this is the main process of the run."""
        return self.strategy.rank == 0

    def is_local_process_zero(self) -> bool:
        """Return whether this is the main process of its machine."""
        return self.strategy.local_rank == 0

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples per optimizer update over all ranks; ranks that split a layer share their samples."""
        return total_batch_size(args, world_size=self.strategy.world_size // self.get_tp_size())

    def get_tp_size(self) -> int:
        """Return the number of processes that each layer is split across, 1 if none.

        Source: the documented `Trainer.get_tp_size`.
        """
        return tensor_parallel_size(self.model, getattr(self.strategy, "config", None))

    def get_cp_size(self) -> int:
        """Return 1, the number of processes a sequence is split over. Source: the documented `Trainer.get_cp_size`."""
        return 1

    def get_sp_size(self) -> int:
        """Return 1, the number of processes a sequence is split over. Source: the documented `Trainer.get_sp_size`."""
        return 1

    def create_accelerator_and_postprocess(self) -> None:
        """Create `accelerator` again; launches the strategy. Collective."""
        parts = self.args, self.strategy, self.precision, self._computing
        self._computing.accelerator = make_accelerator(*parts)

    def propagate_args_to_deepspeed(self, auto_find_batch_size: bool = False) -> None:
        """Write the arguments into the DeepSpeed config.

        Source: the documented `Trainer.propagate_args_to_deepspeed`.
        """
        propagate = getattr(self.strategy, "propagate_args", None)
        if not self.is_deepspeed_enabled or propagate is None:
            raise ConfigError(
                "Cannot run propagate_args_to_deepspeed().",
                f"strategy={self.strategy.name!r} has no DeepSpeed config.",
                "Pass deepspeed= in the arguments, or leave the call out.",
            )
        propagate(self.args, auto_find_batch_size=auto_find_batch_size)

    @property
    def _trial(self) -> Any:
        """The current trial of a search, as the backend passed it."""
        return None if self._trial_run is None else self._trial_run.trial

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Seed the random number generators and build the model with `model_init`."""
        assert self.model_init is not None
        set_seed(self.args.seed)
        parameters = inspect.signature(self.model_init).parameters.values()
        if sum(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters) > 1:
            raise ConfigError(
                "Cannot call model_init:",
                "it takes more than the trial.",
                "Define it without arguments, or with the trial only.",
            )
        model = self.model_init(trial) if takes_trial(self.model_init) else self.model_init()
        if model is None:
            raise ConfigError("Cannot use what model_init returned:", "it is None.", "End it with return model.")
        return model
