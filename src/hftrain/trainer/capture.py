"""What a checkpoint's writers need of the model, taken so that training may go on while they write."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrain.checkpoint.parts import save_arguments
from hftrain.checkpoint.weights import save_task_state, save_weights
from hftrain.core.state import TrainerState
from hftrain.task.module import TaskModule

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

Keep = Callable[[Any], Any]

# What a model writes beside its weights, and what may change while it trains.
_CONFIGS = ("config", "generation_config")


def as_it_is(tree: Any) -> Any:
    """Copy nothing, for what is written at once."""
    return tree


def task_state(task: TaskModule) -> dict[str, torch.Tensor]:
    """Return what the task itself holds beside its model."""
    with without_model(task):
        return task.state_dict()


@contextmanager
def without_model(task: TaskModule) -> Iterator[TaskModule]:
    """Take the model out for a while: its state may be in pieces, and reading it a thing for all processes."""
    model = task.model
    del task.model
    try:
        yield task
    finally:
        task.model = model


def model_writer(trainer: Trainer, keep: Keep) -> Callable[[Path], None]:
    """Return what writes the model and what belongs to it as they are now. Collective.

    Args:
        trainer: Whose model.
        keep: Copies tensors to host memory.
    """
    strategy, wrapped = trainer.strategy, trainer.model_wrapped
    weights = {} if strategy.model_shards(wrapped) is not None else strategy.model_state(wrapped)
    if not trainer.args.should_save:
        return lambda folder: None
    weights, own = keep(dict(weights)), keep(task_state(trainer.task))
    model, arguments = _with_own_configs(trainer.model), trainer.args.to_dict()

    def write(folder: Path) -> None:
        write_model(trainer, folder, model=model, weights=weights, own=own, arguments=arguments)

    return write


def write_model(
    trainer: Trainer,
    folder: Path,
    *,
    model: nn.Module,
    weights: Mapping[str, torch.Tensor] | None,
    own: Mapping[str, torch.Tensor],
    arguments: dict[str, Any],
) -> None:
    """Write a model, what its task holds beside it, the processing class and the arguments."""
    save_weights(model, folder, state_dict=weights, safe=bool(trainer.args.save_safetensors))
    save_task_state(own, folder)
    tool = trainer.processing_class
    if tool is None:
        tool = getattr(trainer.data_collator, "tokenizer", None)
    if hasattr(tool, "save_pretrained"):
        tool.save_pretrained(str(folder))
    save_arguments(arguments, folder)


def frozen_state(state: TrainerState) -> TrainerState:
    """Return a copy of the documented state that later steps do not change."""
    frozen = copy.copy(state)
    # Entries are plain numbers and text; a deep copy of a long history takes a thousand times as long.
    frozen.log_history = [dict(entry) for entry in state.log_history]
    frozen.stateful_callbacks = copy.deepcopy(state.stateful_callbacks)
    return frozen


def _with_own_configs(model: nn.Module) -> nn.Module:
    """Return another face of a model: the same parts, with copies of its configurations."""
    # Not copy.copy: the classes that FSDP makes cannot be copied.
    face: nn.Module = object.__new__(type(model))
    vars(face).update(vars(model))
    vars(face).update({name: copy.deepcopy(vars(model)[name]) for name in _CONFIGS if name in vars(model)})
    return face
