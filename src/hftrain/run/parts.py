"""The parts of a run: the Trainer's parts, a model ready to train, and the documented methods that it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks.runner import CallbackHandler
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.parcels import Parcels
from hftrain.checkpoint.participants import InManifest
from hftrain.checkpoint.policy import SavePolicy
from hftrain.core.progress import Progress, TrainerControl
from hftrain.core.state import TrainerState
from hftrain.loops.contract import Loop
from hftrain.loops.window import LogWindow, LossWindow
from hftrain.precision.base import Precision
from hftrain.run.counting import Take
from hftrain.run.journal import Journal
from hftrain.run.model_changes import ModelChanges
from hftrain.run.output import Output
from hftrain.run.outside_weights import OutsideWeights
from hftrain.run.plan import RunPlan
from hftrain.step.computing import Computing
from hftrain.step.stepper import Stepper
from hftrain.strategies.base import Strategy
from hftrain.task.module import TaskModule


@dataclass(slots=True)
class Phase:
    """A description of what a run is doing; None in a step or an evaluation."""

    text: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunParts:
    """Parts that exist before a run is built.

    Args:
        losses: The open logging window.
        logs: Values logged by the steps in that window.
        trial: The current trial of a search, from its backend.
        ignore_keys: Outputs that evaluations leave out of the predictions.
        progress: The position of the run.
        pending: Functions that the loop calls at the end of each step, see `FitParts`.
    """

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
    progress: Progress = field(default_factory=Progress)
    pending: list[Callable[[], None]] = field(default_factory=list)
    phase: Phase = field(default_factory=Phase)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A placed and wrapped model, with what trains it.

    Args:
        model: Not wrapped.
        take: Takes a step's batches and counts their items.
        training_step: Runs forward and backward on one batch.
        outside: Parameters that the optimizer trains but the model does not contain.
        changes: Changes of the model during training.
        facts: Further parts of the state that the manifest records.
    """

    task: TaskModule
    model: nn.Module
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    stepper: Stepper
    take: Take
    training_step: Callable[[nn.Module, Any, Any], torch.Tensor]
    outside: OutsideWeights
    changes: ModelChanges
    facts: Sequence[InManifest] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHooks:
    """The Trainer's methods that a run calls, looked up at each call; collective where the documented ones are.

    Args:
        owner: The name of the Trainer's class.
        is_overridden: Tells whether the user's class overrides a documented method.
        where: Returns a description of what the Trainer is doing; from any thread.
        make_manager: Returns the manager that commits the run's checkpoints.
        make_model: Returns the unwrapped model, from `model_init` if given.
        open_loader: Returns this rank's training batches, from another dataset if one is given.
        plan: (checkpoint, loader, progress) -> the run's plan; sets `progress` to its start.
        start_state: (checkpoint, plan); initialises the documented state.
        ready: (checkpoint, plan); makes the model ready to train, within the context.
        holders: Returns the objects that may have `checkpoint_objects`, with their names.
        dataset: Returns the current training dataset, or None; this and the next three are read at each call, because
            scripts and callbacks may replace them.
        processing_class: Returns the current processing class, or None.
        tool: Returns what a checkpoint saves to prepare inputs, or None.
        optimizer: Returns the documented `optimizer`.
        schedule: Returns the documented `lr_scheduler`.
        count_flos: The documented `floating_point_ops`.
        learning_rate: The documented hook, called with the rate that the step used.
        step_end: Returns the documented `_maybe_log_save_evaluate`, whose signature is inspected.
        finish: Ends the documented state of training, and adds the memory use to the metrics.
    """

    owner: str
    is_overridden: Callable[[str], bool]
    where: Callable[[], str]
    make_manager: Callable[[Parcels | None], CheckpointManager]
    make_model: Callable[[], nn.Module]
    open_loader: Callable[..., Any]
    plan: Callable[[Path | None, Any, Progress], RunPlan]
    start_state: Callable[[Path | None, RunPlan], None]
    ready: Callable[[Path | None, RunPlan], AbstractContextManager[Ready]]
    holders: Callable[[], Sequence[tuple[str, Any]]]
    dataset: Callable[[], Any]
    processing_class: Callable[[], Any]
    tool: Callable[[], Any]
    optimizer: Callable[[], Any]
    schedule: Callable[[], Any]
    count_parameters: Callable[[], int]
    mark_sync: Callable[[bool], None]
    count_flos: Callable[[Any], float]
    add_flos: Callable[[float], None]
    store_flos: Callable[[], None]
    read_metrics: Callable[[], Mapping[str, Any]]
    learning_rate: Callable[[float], float]
    log: Callable[[dict[str, Any]], None]
    evaluate: Callable[..., Mapping[str, float]]
    evaluate_once: Callable[..., Mapping[str, float]]
    is_best: Callable[[Mapping[str, Any], Any], bool]
    step_end: Callable[[], Callable[..., None]]
    save: Callable[[nn.Module, Any], None]
    save_model: Callable[[str], None]
    save_optimizer: Callable[[str], None]
    load_model: Callable[[str], None]
    load_optimizer: Callable[[str], None]
    load_numbers: Callable[[str], None]
    load_best: Callable[[], None]
    rotate: Callable[..., None]
    push: Callable[[str], None]
    push_at_end: Callable[[], None]
    finish: Callable[[dict[str, Any]], None]
