"""The parts of the model that a checkpoint needs, captured so that training can continue during the write."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.checkpoint.layout import ARGUMENTS
from hftrain.checkpoint.states import Keep
from hftrain.checkpoint.weights import save_task_state, save_weights
from hftrain.core.state import TrainerState
from hftrain.run.parts import RunParts, TrainerHooks
from hftrain.storage.tensors import save_containers
from hftrain.task.module import task_state

# Configurations that a model writes next to its weights, and that may change during training.
_CONFIGS = ("config", "generation_config")


def model_writer(parts: RunParts, keep: Keep) -> Callable[[Path], None]:
    """Return a function that writes the current model and its other files. Collective.

    Args:
        keep: Copies tensors to host memory.
    """
    args, strategy, model, tool = parts.args, parts.strategy, parts.wrapped, saved_tool(parts.trainer)
    weights = {} if strategy.model_shards(model) is not None else strategy.model_state(model)
    if not args.should_save:
        return lambda folder: None
    weights, own = keep(dict(weights)), keep(task_state(parts.task))
    face, arguments = _with_own_configs(strategy.unwrap(model)), args.to_dict()

    def write(folder: Path) -> None:
        write_model(folder, model=face, weights=weights, own=own, tool=tool, arguments=arguments)

    return write


def write_model(
    folder: Path,
    *,
    model: nn.Module,
    weights: Mapping[str, torch.Tensor] | None,
    own: Mapping[str, torch.Tensor],
    tool: Any,
    arguments: dict[str, Any],
) -> None:
    """Write a model, the state of its task outside the model, the processing class and the arguments."""
    save_weights(model, folder, state_dict=weights, safe=bool(arguments["save_safetensors"]))
    save_task_state(own, folder)
    if hasattr(tool, "save_pretrained"):
        tool.save_pretrained(str(folder))
    save_containers(arguments, folder / ARGUMENTS)


def saved_tool(trainer: TrainerHooks) -> Any:
    """Return what is saved next to a model: the processing class, or the collator's tokenizer."""
    tool = trainer.processing_class
    return getattr(trainer.data_collator, "tokenizer", None) if tool is None else tool


def frozen_state(state: TrainerState) -> TrainerState:
    """Return a copy of the documented state, independent of later steps, without the log history."""
    frozen = copy.copy(state)
    frozen.log_history = []  # stored in `HistoryText`
    frozen.stateful_callbacks = copy.deepcopy(state.stateful_callbacks)
    return frozen


def _with_own_configs(model: nn.Module) -> nn.Module:
    """Return a shallow copy of a model with copies of its configurations."""
    # Not copy.copy: the classes that FSDP creates cannot be copied.
    face: nn.Module = object.__new__(type(model))
    vars(face).update(vars(model))
    vars(face).update({name: copy.deepcopy(vars(model)[name]) for name in _CONFIGS if name in vars(model)})
    return face
