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

from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks.runner import CallbackHandler
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.policy import SavePolicy
from hftrain.checkpoint.registry import Entry
from hftrain.checkpoint.remote import NodeUploads
from hftrain.core.progress import Progress, TrainerControl
from hftrain.core.state import TrainerState
from hftrain.core.types import EvalLoopOutput
from hftrain.data.limits import Limits
from hftrain.loops.contract import Loop
from hftrain.loops.fit import FitLoop
from hftrain.loops.window import LogWindow, LossWindow
from hftrain.precision.base import Precision
from hftrain.run.data import RunData
from hftrain.run.journal import Journal
from hftrain.run.output import Output
from hftrain.run.trained_parameters import TrainedParameters
from hftrain.step.stepper import Computing, Stepper
from hftrain.strategies.base import Strategy
from hftrain.task.compilation import Compiler
from hftrain.task.module import TaskModule

Take = Callable[[Iterator[Any], int, torch.device], tuple[list[Any], Any]]


@dataclass(kw_only=True, slots=True)
class RunParts:
    """The parts of a run: those that exist before, and those that are made while it is built, in this order.

    Args:
        trainer: Whose documented methods the run calls.
        losses: The open logging window.
        logs: Values logged by the steps in that window.
        trial: The current trial of a search, from its backend.
        ignore_keys: Outputs that evaluations leave out of the predictions.
        where: Describes what the Trainer is doing; from any thread.
        read_metrics: Computes and resets the task's training metrics.
        progress: The position of the run.
        pending: Functions that the loop calls at the end of each step, see `FitParts`.
        phase: Describes what the run is doing; None in a step or an evaluation.
        is_evaluating: Whether an evaluation is running, or has failed: the resumed run starts with it.
        wrap: Wraps the model, while the run calls `_wrap_model`.

    Attributes:
        manager: Commits the checkpoints; its folder is the run's.
        loop: Runs the steps.
        data: The training data.
        trained: The parameters that train, within the model and outside.
        model: Not wrapped.
        unchanged: Opens a context with the model's configuration as it was before training.
        facts: Further parts of the state that the manifest records.
    """

    trainer: TrainerHooks
    args: TrainingArguments
    save_policy: SavePolicy
    strategy: Strategy
    precision: Precision
    computing: Computing
    loops: Mapping[str, Loop[Any]]
    output: Output
    state: TrainerState
    control: TrainerControl
    events: CallbackHandler
    losses: LossWindow
    logs: LogWindow
    trial: Any
    ignore_keys: list[str] | None
    journal: Journal
    where: Callable[[], str]
    read_metrics: Callable[[], Mapping[str, Any]]
    progress: Progress = field(default_factory=Progress)
    pending: list[Callable[[], None]] = field(default_factory=list)
    phase: str | None = None
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

    A run looks them up at each use, because subclasses override them and scripts assign them during a run. The methods
    below the line are the Trainer's own part of a run.
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
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    compiler: Compiler
    compute_loss_func: Any
    optimizer_cls_and_kwargs: Any
    model_init: Any
    save_policy: SavePolicy
    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    limits: Limits
    worker_seeds: str
    loops: Mapping[str, Loop[Any]]
    neftune_noise_alpha: float | None
    is_deepspeed_enabled: Any
    current_flos: float
    _signature_columns: list[str] | None
    _eval_dataloaders: dict[str, Any]

    @property
    def output_dir(self) -> Path: ...
    @property
    def callback_handler(self) -> CallbackHandler:
        """The callbacks."""

    def get_total_train_batch_size(self, *args: Any, **options: Any) -> int: ...
    def get_tp_size(self, *args: Any, **options: Any) -> int: ...
    def _get_dataloader(self, *args: Any, **options: Any) -> Any: ...
    def set_initial_training_values(
        self, *args: Any, **options: Any
    ) -> tuple[int, int, int, int, bool, int | None, int]: ...
    def get_optimizer_cls_and_kwargs(self, *args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]: ...
    def create_optimizer(self, *args: Any, **options: Any) -> torch.optim.Optimizer: ...
    def create_scheduler(self, *args: Any, **options: Any) -> Any: ...
    def create_optimizer_and_scheduler(self, *args: Any, **options: Any) -> None: ...
    def _wrap_model(self, *args: Any, **options: Any) -> nn.Module: ...
    def _align_special_tokens(self, *args: Any, **options: Any) -> None: ...
    def _activate_neftune(self, *args: Any, **options: Any) -> nn.Module: ...
    def _deactivate_neftune(self, *args: Any, **options: Any) -> None: ...
    def _get_learning_rate(self, *args: Any, **options: Any) -> float: ...
    def _get_eval_sampler(self, *args: Any, **options: Any) -> Any: ...
    def _set_signature_columns_if_needed(self, *args: Any, **options: Any) -> None: ...
    def _remove_unused_columns(self, *args: Any, **options: Any) -> Any: ...
    def _get_collator_with_removed_columns(self, *args: Any, **options: Any) -> Callable[[list[Any]], Any]: ...
    def evaluation_loop(self, *args: Any, **options: Any) -> EvalLoopOutput: ...
    def prediction_step(self, *args: Any, **options: Any) -> tuple[Any, Any, Any]: ...
    def torch_jit_model_eval(self, *args: Any, **options: Any) -> nn.Module: ...
    def compute_loss_context_manager(self) -> AbstractContextManager[Any]: ...
    def _prepare_inputs(self, inputs: Any) -> Any: ...
    def _nested_gather(self, *args: Any, **options: Any) -> Any: ...
    def num_examples(self, dataloader: Any) -> int: ...
    def get_num_trainable_parameters(self, *args: Any, **options: Any) -> int: ...
    def floating_point_ops(self, *args: Any, **options: Any) -> float: ...
    def store_flos(self, *args: Any, **options: Any) -> None: ...
    def evaluate(self, *args: Any, **options: Any) -> Mapping[str, float]: ...
    def _evaluate(self, *args: Any, **options: Any) -> Mapping[str, float]: ...
    def _determine_best_metric(self, *args: Any, **options: Any) -> bool: ...
    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None: ...
    def create_model_card(self, *args: Any, **options: Any) -> None: ...
    def save_model(self, *args: Any, **options: Any) -> None: ...
    def _save_checkpoint(self, *args: Any, **options: Any) -> None: ...
    def _save_optimizer_and_scheduler(self, *args: Any, **options: Any) -> None: ...
    def _rotate_checkpoints(self, *args: Any, **options: Any) -> None: ...
    def _push_from_checkpoint(self, *args: Any, **options: Any) -> None: ...
    def _load_from_checkpoint(self, *args: Any, **options: Any) -> None: ...
    def _load_optimizer_and_scheduler(self, *args: Any, **options: Any) -> None: ...
    def _load_rng_state(self, *args: Any, **options: Any) -> None: ...
    def _load_best_model(self, *args: Any, **options: Any) -> None: ...

    # -- not documented ------------------------------------------------------------------------------------------

    # The parts of the current run, None between runs.
    _run_parts: RunParts | None
    # The user's wrapper around the model, if any, else the model.
    _outermost: nn.Module
    # Number of batches of a running memory estimate.
    _num_estimated: int
    # The documented `log`, called in its older form if an override has that.
    _slot_log: Callable[..., Any]
    # The documented `compute_loss` and `training_step`, likewise.
    _slot_compute_loss: Callable[..., Any]
    _slot_training_step: Callable[..., Any]

    @property
    def _num_rehearsed(self) -> int: ...
    def _is_overridden(self, name: str) -> bool:
        """Tell whether the user's class or instance overrides a documented method."""

    def _resolve_hooks(self) -> None: ...
    def _stop_observing(self) -> None: ...
    def _make_manager(self, uploads: NodeUploads | None = None) -> CheckpointManager:
        """Return the manager that commits the run's checkpoints."""

    def _make_model(self) -> nn.Module: ...
    def _open_training_data(self, *dataset: Any) -> Any: ...
    def _start_state(self, resume: Path | None, *, num_steps: int, num_epochs: int) -> None: ...
    def _forget_schedule(self) -> None: ...
    def _cast_model(self) -> None: ...
    def _begin_steps(self) -> Mapping[str, Entry]: ...
    def _end_steps(self) -> None:
        """Undo `_begin_steps`."""

    def _steps(self, resume: Path | None) -> tuple[Take, Callable[[nn.Module, Any, Any], torch.Tensor]]: ...
    def _note_sync(self, syncs: bool) -> None: ...
    def _try_evaluation(self) -> None: ...
    def _finish_training(self, metrics: dict[str, Any]) -> None:
        """End the documented state of training, and add the memory use to the metrics."""


def checkpoint_object_owners(trainer: TrainerHooks) -> Sequence[tuple[str, Any]]:
    """Return the objects that may have `checkpoint_objects`, with their names."""
    callbacks = [(type(each).__name__, each) for each in trainer.callback_handler.callbacks]
    return [("trainer", trainer), ("task", trainer.task), *callbacks]


def loss_window(trainer: TrainerHooks) -> LossWindow:
    """Return the window that sums the losses between two logs, over all processes; an override may gather them."""
    reduce: Callable[[torch.Tensor], torch.Tensor] = partial(trainer.strategy.reduce, op="mean")
    if trainer._is_overridden("_nested_gather"):
        reduce = lambda loss: trainer._nested_gather(loss).mean()  # noqa: E731
    # Documented: not on XLA.
    filters = trainer.args.logging_nan_inf_filter and trainer.strategy.device_type != "xla"
    is_live = trainer._is_overridden("_maybe_log_save_evaluate")
    return LossWindow(filters_nonfinite=filters, reduce=reduce, is_live=is_live)
