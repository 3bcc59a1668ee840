"""Small steps in the set-up of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from hftrain.checkpoint.state_files import load_trainer_state
from hftrain.core.state import TrainerState
from hftrain.loops.window import LossWindow
from hftrain.run.parts import TrainerHooks
from hftrain.strategies.base import Strategy
from hftrain.task.module import TaskModule


def place_task(task: TaskModule, strategy: Strategy, *, is_model_placed: bool = False) -> None:
    """Move a task's metrics and other parts to the device, and the model unless the strategy does."""
    model = task.model
    # Its other children, and its own tensors.
    del task.model
    task.to(strategy.device)
    task.model = model if is_model_placed else strategy.place(model)


def loss_window(trainer: TrainerHooks) -> LossWindow:
    """Return the window that sums the losses between two logs, over all processes; an override may gather them."""
    reduce: Callable[[torch.Tensor], torch.Tensor] = partial(trainer.strategy.reduce, op="mean")
    if trainer._is_overridden("_nested_gather"):
        reduce = lambda loss: trainer._nested_gather(loss).mean()  # noqa: E731
    # Documented: not on XLA.
    filters = trainer.args.logging_nan_inf_filter and trainer.strategy.device_type != "xla"
    is_live = trainer._is_overridden("_maybe_log_save_evaluate")
    return LossWindow(filters_nonfinite=filters, reduce=reduce, is_live=is_live)


def empty_cache() -> None:
    """Release the device memory in torch's cache."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def start_state(
    trainer: TrainerHooks, fresh: TrainerState, resume: Path | None, *, num_steps: int, num_epochs: int
) -> None:
    """Initialise the documented state, from a checkpoint if given; in place, because callbacks refer to it."""
    state, args = trainer.state, trainer.args
    loaded = fresh if resume is None else load_trainer_state(resume)
    for flag in ("is_local_process_zero", "is_world_process_zero"):
        setattr(loaded, flag, getattr(fresh, flag))
    vars(state).update(vars(loaded))
    state.max_steps, state.num_train_epochs = num_steps, num_epochs
    if state.epoch is None:
        state.epoch = 0.0
    state.train_batch_size = args.train_batch_size
    state.compute_steps(args, num_steps)
