"""The parts of a run, and what a run calls of the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from hftrain.adapter.data import data_seed
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks.runner import CallbackHandler
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.state_files import Entry
from hftrain.checkpoint.writer import SavePolicy
from hftrain.core.extras import extra
from hftrain.core.signatures import Hooks
from hftrain.core.state import Progress, TrainerControl, TrainerState, expects_save
from hftrain.core.types import EvalLoopOutput
from hftrain.data.feed import TrainFeed
from hftrain.data.loaders import Limits
from hftrain.data.samplers import is_rank_aware, samplers_of
from hftrain.data.sharding import end_workers
from hftrain.data.states import resumable_loader
from hftrain.loops.contract import Loop
from hftrain.loops.fit import FitLoop
from hftrain.loops.window import LogWindow, LossWindow
from hftrain.precision.base import Precision
from hftrain.run.journal import Journal
from hftrain.run.output import Output
from hftrain.run.trained_parameters import TrainedParameters
from hftrain.step.stepper import StepCalls, Stepper
from hftrain.strategies.base import Strategy
from hftrain.task.compilation import Compiler
from hftrain.task.module import TaskModule


class RunData:
    """Open a run's training data. Collective.

    Attributes:
        feed: The batches that the loop reads; a loop may replace them.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self.feed = self._open_feed()

    def replace(self, dataset: Any) -> TrainFeed:
        """Read another dataset from now on; collective."""
        former_feed, self.feed = self.feed, self._open_feed(dataset)
        self.feed.take_over(former_feed)
        self._parts.events.refresh(train_dataloader=self.feed.loader)
        return self.feed

    def close(self) -> None:
        """Release the data."""
        # Persistent workers live as long as their loader, and torch's optimizers keep a frame that refers to it.
        end_workers(self.feed.loader)
        self.feed.close()

    def _open_feed(self, *dataset: Any) -> TrainFeed:
        parts, strategy, seed = self._parts, self._parts.strategy, data_seed(self._parts.args)
        loader = parts.services.open_data(*dataset)
        for wrap in parts.events.at_point("wrap_loader"):
            loader = wrap(loader)
        loader = resumable_loader(loader, seed=seed, rank=strategy.data.rank)
        if dataset:
            end_workers(self.feed.loader)
        limits, is_always = parts.trainer.limits, parts.save_policy.on_exception  # which stores it before every step
        make_feed = partial(extra("limits").LimitedFeed, limits=limits) if limits.of_training else TrainFeed
        is_save_next = partial(expects_save, parts.progress, parts.state, saves_always=is_always)
        feed: TrainFeed = make_feed(loader, seed=seed, expects_save=is_save_next)
        if strategy.world_size > 1:
            gathered = strategy.gather_object([strategy.data.rank, feed.own_seeds])
            main_seeds, feed.own_seeds = gathered[0][1], next(s for rank, s in gathered if rank == strategy.data.rank)
            # One order for the ranks that cut it into shares; a loader of this rank's own part keeps its own.
            if any(map(is_rank_aware, samplers_of(loader))):
                feed.own_seeds = [*main_seeds, *feed.own_seeds[len(main_seeds) :]]
        return feed


Take = Callable[[Iterator[Any], int, torch.device], tuple[list[Any], Any]]


@dataclass(kw_only=True, slots=True)
class RunParts:
    """The parts of a run: those that exist before, and those that are made while it is built, in this order.

    Args:
        hooks: The documented methods that the run calls.
        losses: The open logging window.
        logs: Values logged by the steps in that window.
        trial_run: The current trial of a search, with its results; None outside of one.
        ignore_keys: Outputs that evaluations leave out of the predictions.
        pending: Functions that the loop calls at the end of each step, see `FitParts`.
        phase: Describes what the run is doing; None in a step or an evaluation.
        is_saving: Whether a checkpoint is being saved, or could not be.
        is_evaluating: Whether an evaluation is running, or has failed: the resumed run starts with it.
        wrap: Wraps the model, while the run calls `_wrap_model`.

    Attributes:
        manager: Commits the checkpoints; its folder is the run's.
        trained: The parameters that train, within the model and outside.
        model: Not wrapped.
        unchanged: Opens a context with the model's configuration as it was before training.
        facts: Further parts of the state that the manifest records.
    """

    trainer: TrainerHooks
    hooks: Hooks
    args: TrainingArguments
    save_policy: SavePolicy
    strategy: Strategy
    precision: Precision
    computing: StepCalls
    loops: Mapping[str, Loop[Any]]
    output: Output
    state: TrainerState
    control: TrainerControl
    events: CallbackHandler
    losses: LossWindow
    logs: LogWindow
    trial_run: Any
    ignore_keys: list[str] | None
    journal: Journal
    services: TrainerServices
    progress: Progress = field(default_factory=Progress)
    pending: list[Callable[[], None]] = field(default_factory=list)
    phase: str | None = None
    is_saving: bool = False
    is_evaluating: bool = False
    wrap: Callable[[nn.Module], nn.Module] | None = None
    manager: CheckpointManager = field(init=False)
    loop: FitLoop = field(init=False)
    data: RunData = field(init=False)
    task: TaskModule = field(init=False)
    trained: TrainedParameters = field(init=False)
    model: nn.Module = field(init=False)
    unchanged: Callable[[], AbstractContextManager[Any]] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    wrapped: nn.Module = field(init=False)
    stepper: Stepper = field(init=False)
    facts: Mapping[str, Entry] = field(init=False)

    def best_checkpoint(self) -> Path | None:
        """Return the folder of the best model so far."""
        best, output = self.state.best_model_checkpoint, self.output
        if best is None:
            return None
        # By name first: the folder of the run may have been moved or copied since.
        here = output.folder / Path(best).name
        return here if here.is_dir() or output.url_of(here.parent) else Path(best)


class TrainerHooks(Protocol):
    """The documented attributes and hooks of a Trainer, with its documented arguments; collective where those are.

    A run looks them up at each use, because subclasses override them and scripts assign them during a run.
    """

    args: TrainingArguments
    strategy: Strategy
    precision: Precision
    state: TrainerState
    control: TrainerControl
    task: TaskModule
    model: nn.Module
    model_wrapped: nn.Module
    label_names: list[str]
    can_return_loss: bool
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    data_collator: Any
    eval_collator: Any
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    compiler: Compiler
    compute_loss_func: Any
    optimizer_cls_and_kwargs: Any
    model_init: Any
    count_items: Any
    model_accepts_loss_kwargs: Any
    is_model_parallel: bool
    is_in_train: bool
    fast_dev_run: int
    save_policy: SavePolicy
    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    limits: Limits
    loops: Mapping[str, Loop[Any]]
    neftune_noise_alpha: float | None
    is_deepspeed_enabled: Any
    current_flos: float

    @property
    def output_dir(self) -> Path: ...
    @property
    def place_model_on_device(self) -> bool: ...
    @property
    def callback_handler(self) -> CallbackHandler:
        """The callbacks."""

    def get_total_train_batch_size(self, *args: Any, **options: Any) -> int: ...
    def get_tp_size(self, *args: Any, **options: Any) -> int: ...
    def set_initial_training_values(
        self, *args: Any, **options: Any
    ) -> tuple[int, int, int, int, bool, int | None, int]: ...
    def get_optimizer_cls_and_kwargs(self, *args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]: ...
    def create_optimizer(self, *args: Any, **options: Any) -> torch.optim.Optimizer: ...
    def create_scheduler(self, *args: Any, **options: Any) -> Any: ...
    def create_optimizer_and_scheduler(self, *args: Any, **options: Any) -> None: ...
    def evaluation_loop(self, *args: Any, **options: Any) -> EvalLoopOutput: ...
    def prediction_step(self, *args: Any, **options: Any) -> tuple[Any, Any, Any]: ...
    def torch_jit_model_eval(self, *args: Any, **options: Any) -> nn.Module: ...
    def compute_loss(self, *args: Any, **options: Any) -> Any: ...
    def compute_loss_context_manager(self) -> AbstractContextManager[Any]: ...
    def num_examples(self, dataloader: Any) -> int: ...
    def get_num_trainable_parameters(self, *args: Any, **options: Any) -> int: ...
    def floating_point_ops(self, *args: Any, **options: Any) -> float: ...
    def store_flos(self, *args: Any, **options: Any) -> None: ...
    def evaluate(self, *args: Any, **options: Any) -> Mapping[str, float]: ...
    def create_model_card(self, *args: Any, **options: Any) -> None: ...
    def save_model(self, *args: Any, **options: Any) -> None: ...

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]: ...
    def call_model_init(self, trial: Any = None) -> nn.Module: ...
    def get_train_dataloader(self) -> Any: ...
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any: ...
    def add_callback(self, callback: Any) -> None: ...
    def remove_callback(self, callback: Any) -> None: ...
    def is_world_process_zero(self) -> bool: ...
    def is_local_process_zero(self) -> bool: ...


class TrainerPart:
    """A part of a Trainer, with state that a rehearsal restores."""

    def __init__(self, trainer: TrainerHooks, hooks: Hooks) -> None:
        self._trainer, self._hooks = trainer, hooks


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerServices:
    """What the parts of a Trainer do for a run; collective where the documented methods are."""

    make_model: Callable[[], nn.Module]  # returns the bare model, rebuilt if there is a `model_init`
    outermost: Callable[[], nn.Module]  # the user's wrapper around the model, if any, else the model
    open_data: Callable[..., Any]  # this rank's training batches, or those of another dataset if one is given
    forget_schedule: Callable[[], None]  # drops what an earlier run made
    cast_model: Callable[[], None]  # makes the model cast itself, where user code computes a loss
    begin_steps: Callable[[], Mapping[str, Entry]]  # returns what the manifest records of them
    end_steps: Callable[[], None]
    step_functions: Callable[[Path | None, LogWindow], tuple[Take, Callable[[nn.Module, Any, Any], torch.Tensor]]]
    mark_sync: Callable[[bool], None]  # notes whether an update follows the next micro-step
    check_cadences: Callable[[], None]  # of the evaluation sets, once the length of the run is known
    try_evaluation: Callable[[], None]  # as `sanity_eval_batches` says; leaves no trace
    read_metrics: Callable[[], Mapping[str, Any]]  # computes and resets the task's training metrics
    report_memory: Callable[[dict[str, Any]], None]  # adds the memory use to metrics
    where: Callable[[], str]  # describes what the Trainer is doing; from any thread


def checkpoint_object_owners(trainer: TrainerHooks) -> Sequence[tuple[str, Any]]:
    """Return the objects that may have `checkpoint_objects`, with their names."""
    callbacks = [(type(each).__name__, each) for each in trainer.callback_handler.callbacks]
    return [("trainer", trainer), ("task", trainer.task), *callbacks]


def loss_window(trainer: TrainerHooks, hooks: Hooks) -> LossWindow:
    """Return the window that sums the losses between two logs, over all processes; an override may gather them."""
    reduce: Callable[[torch.Tensor], torch.Tensor] = partial(trainer.strategy.reduce, op="mean")
    if hooks.is_overridden("_nested_gather"):
        reduce = lambda loss: hooks.nested_gather(loss).mean()  # noqa: E731
    # Documented: not on XLA.
    hides = trainer.args.logging_nan_inf_filter and trainer.strategy.device_type != "xla"
    is_live = hooks.is_overridden("_maybe_log_save_evaluate")
    kind: type[LossWindow] = extra("live_window").LiveLossWindow if is_live else LossWindow
    return kind(hides_nonfinite=hides, reduce=reduce)


def make_manager(trainer: TrainerHooks, hooks: Hooks, output: Output, uploads: Any = None) -> CheckpointManager:
    """Return the manager that saves and finds the checkpoints of a run."""
    args, folder = trainer.args, Path(hooks.get_output_dir(hooks.trial))
    return CheckpointManager(
        folder,
        group=trainer.strategy,
        save_total_limit=args.save_total_limit,
        only_model=bool(args.save_only_model),
        on_each_node=bool(args.save_on_each_node),
        url=output.url_of(folder),
        keep_best=trainer.save_policy.keep_best,
        is_greater_better=bool(args.greater_is_better),
        uploads=uploads,
    )
