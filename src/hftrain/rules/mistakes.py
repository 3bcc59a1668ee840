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
from hftrain.core.frames import raising_line
from hftrain.core.lightning import MODULE_ATTRIBUTES
from hftrain.core.notes import add_note, describe
from hftrain.data.columns import known_columns
from hftrain.rules.call_mistakes import explain_calls
from hftrain.rules.data_mistakes import locate_in_data
from hftrain.rules.layer_mistakes import explain_layers
from hftrain.rules.tensor_mistakes import explain_tensors
from hftrain.strategies.whole import explain_unused
from hftrain.task.model_task import ModelTask, call_model
from hftrain.task.module import TaskModule

_NO_BATCH = object()


def explain_mistake(
    error: Exception,
    task: TaskModule,
    model: nn.Module,
    *,
    label_names: Sequence[str],
    loss_maker: str | None,
    datasets: Sequence[Any] = (),
) -> None:
    """Raise a `TaskError` in place of an error whose cause is known; add notes with place and batch to others.

    Only the traceback is inspected, so successful steps cost nothing.

    Args:
        error: The error of a step, a collator, a dataset or a callback; notes are added to it.
        loss_maker: The name of the function that returned the loss, if it was neither the task nor the model.
        datasets: The datasets of the run, to find columns that are not in the batch.
    """
    if isinstance(error, HFTrainError) and not isinstance(error, TaskError):
        return
    where = locate_in_data(error)
    if where is not None:
        add_note(error, where)
    if getattr(error, "__notes__", None):
        # Already explained, or not raised in a step.
        return
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    batch = next((found for frame in reversed(frames) if (found := _batch_in(frame)) is not _NO_BATCH), _NO_BATCH)
    cause: HFTrainError | None = None
    if not isinstance(error, HFTrainError):
        cause = (
            explain_unused(error, model)
            or _lightnings_attribute(task, error)
            or _broken_backward(error, loss_maker)
            or _unusable_loss(task, model, error, frames, loss_maker)
            or _unusable_batch(task, error, batch)
            or _missing_column(task, error, frames, batch, datasets)
            or _refused_column(task, model, error, frames, label_names)
            or explain_calls(error, frames)
            or explain_tensors(error, frames, model, batch)
            or explain_layers(error, frames, model, batch)
        )
    place = raising_line(error.__traceback__)
    if cause is not None:
        if place is not None:
            add_note(cause, f"At {place}")
        raise cause from error
    owner = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and isinstance(owner, nn.Module):
        parts = ", ".join(name for name, _ in owner.named_children())
        add_note(error, f"{type(owner).__name__} has the children {parts or '(none)'}.")
    if batch is not _NO_BATCH:
        add_note(error, f"The batch: {describe(batch)}.")
    # If the user's own line raised the error, Python's traceback already ends there.
    if place is not None and not isinstance(error, HFTrainError) and f"{frames[-1].f_code.co_filename}:" not in place:
        add_note(error, f"At {place}")


def _batch_in(frame: FrameType) -> Any:
    """Return the batch of a frame of one of our functions, `_NO_BATCH` if there is none."""
    if not frame.f_globals.get("__name__", "").startswith("hftrain."):
        return _NO_BATCH
    found = frame.f_locals.get("inputs", frame.f_locals.get("batch", _NO_BATCH))
    return found if found is None or isinstance(found, (Mapping, list, tuple, torch.Tensor)) else _NO_BATCH


def _lightnings_attribute(task: TaskModule, error: Exception) -> TaskError | None:
    name = getattr(error, "name", None)
    if not isinstance(error, AttributeError) or getattr(error, "obj", None) is not task:
        return None
    if name not in MODULE_ATTRIBUTES:
        return None
    return TaskError(
        f"Cannot use {type(task).__name__}.{name}:", "a TaskModule does not have it.", MODULE_ATTRIBUTES[name]
    )


def _broken_backward(error: Exception, maker: str | None) -> TaskError | None:
    """Return an error if the backward pass failed because of its graph or the result of a step."""
    text = str(error)
    if isinstance(error, RuntimeError) and "backward through the graph a second time" in text:
        return TaskError(
            "Cannot run the backward pass of the loss:",
            "a part of its graph has been freed by an earlier backward().",
            "Return the loss without calling backward(), which the Trainer does; detach() what is kept from one step "
            "to the next, such as a hidden state.",
        )
    if isinstance(error, RuntimeError) and "modified by an inplace operation" in text:
        changed = text.partition("operation: ")[2].partition(";")[0]
        return TaskError(
            "Cannot run the backward pass of the loss:",
            f"a tensor that it needs was changed in place after it was used ({changed}).",
            "Replace x.add_(y), x += y and x[i] = y in the step or the model by x = x + y or x.clone(); "
            "torch.autograd.set_detect_anomaly(True) shows which line made the tensor.",
        )
    if isinstance(error, AttributeError) and error.name == "backward" and not isinstance(error.obj, torch.Tensor):
        returned = describe(error.obj)
        pair = " It must return (loss, outputs) only if return_outputs=True." if isinstance(error.obj, tuple) else ""
        return TaskError(
            f"Cannot train with what {maker or 'the step'} returned ({returned}):",
            "a loss is a tensor of one number.",
            f"Return the loss.{pair}",
        )
    return None


def _unusable_loss(
    task: TaskModule, model: nn.Module, error: Exception, frames: list[FrameType], maker: str | None
) -> TaskError | None:
    """Return an error if a loss could not be differentiated."""
    text = str(error)
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
    if loss.is_complex():
        return TaskError(asked, "it is complex, but a loss must be real.", "Return its abs() or its real part.")
    if loss.requires_grad:
        return None
    return TaskError(
        asked,
        "it does not depend on any trainable parameter.",
        "Compute it from the model's outputs without detach(), item(), argmax() or torch.no_grad(), and leave some of "
        "the parameters that it depends on with requires_grad=True.",
    )


def _unusable_batch(task: TaskModule, error: Exception, batch: Any) -> TaskError | None:
    """Return an error if a step or a plain model failed because the batch is not a mapping of columns."""
    text, plain = str(error), isinstance(task, ModelTask)
    user = type(task.model if plain else task).__name__
    if batch is None and isinstance(error, (TypeError, AttributeError)) and (plain or "NoneType" in text):
        return TaskError(
            f"Cannot use None as a batch of {user}:", "the data_collator returned it.", "Let it return the batch."
        )
    if isinstance(batch, Mapping) and isinstance(error, AttributeError) and error.obj is batch:
        return TaskError(
            f"Cannot read batch.{error.name} in {user}:",
            f"the batch is a {type(batch).__name__} with the columns {', '.join(map(str, batch))}.",
            f"Write batch[{error.name!r}], with a column of the batch.",
        )
    if not isinstance(batch, (list, tuple)) or not isinstance(error, TypeError):
        return None
    by_name = "indices must be integers" in text or "must be a mapping" in text
    if batch and isinstance(batch[0], Mapping) and (plain or by_name):
        return TaskError(
            f"Cannot use a batch of {user} that is a list of samples ({describe(batch)}):",
            "the data_collator returned them as they are.",
            "Let it join them: {'x': torch.stack([sample['x'] for sample in samples]), ...}, or leave it out.",
        )
    if by_name or (plain and "argument" in text):
        return TaskError(
            f"Cannot find columns by name in a batch of {user}: it is a {describe(batch)},",
            "because the samples have no names.",
            "Let the dataset return dicts, such as {'x': ..., 'labels': ...}"
            + (", or write a TaskModule." if plain else ", or unpack the batch: x, y = batch."),
        )
    return None


def _missing_column(
    task: TaskModule, error: Exception, frames: list[FrameType], batch: Any, datasets: Sequence[Any]
) -> TaskError | None:
    """Return an error if a step read a column that its batch does not have."""
    if not isinstance(error, KeyError) or not isinstance(batch, Mapping) or not error.args:
        return None
    name = error.args[0]
    # The batch was indexed directly, or in its own __getitem__.
    is_asked = any(value is batch for frame in frames[-2:] for value in frame.f_locals.values())
    if not isinstance(name, str) or name in batch or not is_asked:
        return None
    remedy = "Rename the dataset's column, or add it: text is tokenized before training (dataset.map) or by a "
    remedy += "data_collator."
    if any(name in (known_columns(dataset) or ()) for dataset in datasets):
        remedy = (
            "The dataset has it, but the collator left it out, as the default one does with text and None: convert "
        )
        remedy += "its values to numbers (labels to integers), or pass a data_collator that does."
    return TaskError(
        f"Cannot give {type(task).__name__} the column {name!r}:",
        f"the batch does not contain it. It contains: {describe(batch)}.",
        remedy,
    )


def _refused_column(
    task: TaskModule, model: nn.Module, error: Exception, frames: list[FrameType], label_names: Sequence[str]
) -> TaskError | None:
    """Return an error if a plain model's forward does not accept the columns of the batch."""
    if not isinstance(error, TypeError) or not isinstance(task, ModelTask) or "argument" not in str(error):
        return None
    called = next((f for f in reversed(frames) if f.f_code is call_model.__code__), None)
    inputs = None if called is None else called.f_locals.get("inputs")
    # The call itself must have failed, not code inside forward.
    if not isinstance(inputs, Mapping) or any(f.f_code.co_name == "forward" for f in frames):
        return None
    if type(model).forward is nn.Module.forward:
        return TaskError(
            f"Cannot call {type(model).__name__}:", "it does not define forward.", "Define forward(self, ...)."
        )
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
