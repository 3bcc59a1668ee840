"""Errors of a step, explained in terms of the user's code."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import HFTrainError, TaskError
from hftrain.core.lightning import MODULE_ATTRIBUTES
from hftrain.rules.tensor_mistakes import explain_tensors
from hftrain.task.model_task import ModelTask, call_model
from hftrain.task.module import TaskModule

_MAX_COLUMNS = 12


def explain_mistake(
    error: Exception, task: TaskModule, model: nn.Module, *, label_names: Sequence[str], loss_maker: str | None
) -> None:
    """Raise a `TaskError` in place of an error whose cause is known; add the batch to what others tell.

    Only what the traceback holds is looked at, so that a step which succeeds pays nothing.

    Args:
        error: What a step raised; a note about the batch is added to it.
        loss_maker: What returned the loss, where it was neither the task nor the model.
    """
    if isinstance(error, HFTrainError):
        return
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    batch = next((found for frame in reversed(frames) if (found := _batch_in(frame)) is not None), None)
    cause = (
        _lightnings_attribute(task, error)
        or _unusable_loss(task, model, error, frames, loss_maker)
        or _missing_column(task, error, frames, batch)
        or _refused_column(task, model, error, frames, label_names)
        or explain_tensors(error, frames)
    )
    if cause is not None:
        raise cause from error
    if batch is not None and not getattr(error, "__notes__", None):
        # As add_note does, which Python 3.10 lacks.
        error.__notes__ = [f"The batch: {_describe(batch)}."]  # type: ignore[attr-defined]


def _batch_in(frame: FrameType) -> Any:
    """Return the batch that one of our functions was working on, None if the frame is not ours."""
    if not frame.f_globals.get("__name__", "").startswith("hftrain."):
        return None
    found = frame.f_locals.get("inputs", frame.f_locals.get("batch"))
    return found if isinstance(found, (Mapping, list, tuple, torch.Tensor)) else None


def _describe(batch: Any) -> str:
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        shown = [f"{name} {_describe(value)}" for name, value in list(batch.items())[:_MAX_COLUMNS]]
        return ", ".join(shown) + (", ..." if len(batch) > _MAX_COLUMNS else "") or "empty"
    if isinstance(batch, (list, tuple)) and any(isinstance(value, torch.Tensor) for value in batch):
        return f"{type(batch).__name__} of ({', '.join(map(_describe, batch[:_MAX_COLUMNS]))})"
    return f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (list, tuple)) else type(batch).__name__


def _lightnings_attribute(task: TaskModule, error: Exception) -> TaskError | None:
    name = getattr(error, "name", None)
    if not isinstance(error, AttributeError) or getattr(error, "obj", None) is not task:
        return None
    if name not in MODULE_ATTRIBUTES:
        return None
    return TaskError(
        f"Cannot use {type(task).__name__}.{name}:", "a TaskModule does not have it.", MODULE_ATTRIBUTES[name]
    )


def _unusable_loss(
    task: TaskModule, model: nn.Module, error: Exception, frames: list[FrameType], maker: str | None
) -> TaskError | None:
    """Return what keeps a loss from being differentiated, if that is what failed."""
    text = str(error)
    if isinstance(error, RuntimeError) and "backward through the graph a second time" in text:
        return TaskError(
            "Cannot run the backward pass of the loss:",
            "a part of its graph has been freed by an earlier backward().",
            "Return the loss without calling backward(), which the Trainer does; detach() what is kept from one step "
            "to the next, such as a hidden state.",
        )
    if not isinstance(error, RuntimeError) or not ("scalar outputs" in text or "does not require grad" in text):
        return None
    losses = [frame.f_locals.get("loss") for frame in frames if frame.f_code.co_name == "training_step"]
    loss = next((each for each in losses if isinstance(each, torch.Tensor)), None)
    if loss is None:
        return None
    if maker is None:
        plain = isinstance(task, ModelTask)
        maker = f"{type(model).__name__}.forward" if plain else f"{type(task).__name__}.training_step"
    asked = f"Cannot train with the loss that {maker} returned:"
    if loss.dim() > 0:
        return TaskError(
            asked, f"it has the shape {tuple(loss.shape)}, but a loss must be one number.", "Return its mean."
        )
    if loss.requires_grad:
        return None
    return TaskError(
        asked,
        "it does not depend on any trainable parameter.",
        "Compute it from the model's outputs without detach(), item() or torch.no_grad(), and leave some parameters "
        "with requires_grad=True.",
    )


def _missing_column(task: TaskModule, error: Exception, frames: list[FrameType], batch: Any) -> TaskError | None:
    """Say that a step asked its batch for a column that is not there, if that is what failed."""
    if not isinstance(error, KeyError) or not isinstance(batch, Mapping) or not error.args:
        return None
    name = error.args[0]
    # The batch is asked directly, or by its own __getitem__.
    is_asked = any(value is batch for frame in frames[-2:] for value in frame.f_locals.values())
    if not isinstance(name, str) or name in batch or not is_asked:
        return None
    return TaskError(
        f"Cannot give {type(task).__name__} the column {name!r}:",
        f"the batch has no such column. It has: {_describe(batch)}.",
        "Rename the dataset's column, or add it: text is tokenized before training (dataset.map) or by a "
        "data_collator.",
    )


def _refused_column(
    task: TaskModule, model: nn.Module, error: Exception, frames: list[FrameType], label_names: Sequence[str]
) -> TaskError | None:
    """Say that a plain model's forward takes not all of the batch's columns, if that is what failed."""
    if not isinstance(error, TypeError) or not isinstance(task, ModelTask) or "argument" not in str(error):
        return None
    called = next((f for f in reversed(frames) if f.f_code is call_model.__code__), None)
    inputs = None if called is None else called.f_locals.get("inputs")
    # The call itself failed, and nothing that forward does.
    if not isinstance(inputs, Mapping) or any(f.f_code.co_name == "forward" for f in frames):
        return None
    taken = list(inspect.signature(model.forward).parameters)
    others = [name for name in inputs if name not in taken]
    remedy = "Rename the columns, or leave them out."
    if any(name in label_names for name in others):
        remedy = (
            "Let forward take the labels and return the loss first, pass compute_loss_func, override compute_loss, or "
            "write a TaskModule."
        )
    return TaskError(
        f"Cannot call {type(model).__name__}.forward with the batch ({str(error).partition(') ')[2] or error}):",
        f"the batch has the columns {', '.join(map(str, inputs))}, and forward takes {', '.join(taken)}.",
        remedy,
    )
