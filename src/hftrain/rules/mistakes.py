"""Errors of a step, explained in terms of the user's code."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import HFTrainError, StrategyError, TaskError
from hftrain.core.frames import raising_line
from hftrain.core.lightning import MODULE_ATTRIBUTES
from hftrain.core.notes import add_note, describe, facts_of
from hftrain.data.columns import known_columns
from hftrain.rules.data_mistakes import locate_in_data
from hftrain.rules.torch_errors import explain_torch
from hftrain.strategies.whole import explain_unused
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule

# Methods that the Trainer calls -> their signatures.
_DOCUMENTED = {
    "compute_loss": "(self, model, inputs, return_outputs=False, num_items_in_batch=None)",
    "compute_metrics": "(prediction), which has predictions and label_ids",
    "configure_optimizers": "(self)",
    "create_optimizer": "(self)",
    "create_scheduler": "(self, num_training_steps, optimizer=None)",
    "evaluate": "(self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval')",
    "evaluation_loop": "(self, dataloader, description, prediction_loss_only=None, ignore_keys=None, "
    "metric_key_prefix='eval')",
    "get_eval_dataloader": "(self, eval_dataset=None)",
    "get_train_dataloader": "(self)",
    "log": "(self, logs, start_time=None)",
    "metrics": "(self, stage)",
    "prediction_step": "(self, model, inputs, prediction_loss_only, ignore_keys=None)",
    "training_step": "(self, model, inputs, num_items_in_batch=None)",
}
_REFUSED = re.compile(r"(\S+)\(\) ((?:missing|takes|got an unexpected|got multiple) .*)")
# Our functions that unpack what an override returns -> the override, and what it must return.
_UNPACKED = {
    "step": ("prediction_step", "(loss, logits, labels), each of which may be None"),
    "predict_batch": ("compute_loss", "(loss, outputs) if return_outputs=True"),
}


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

    What is known of a step (its batch, its loss) was kept with the error where it passed, see `keep_facts`, so
    successful steps cost nothing, and errors of callbacks, metrics and schedules get no batch.

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
    facts, place = facts_of(error), raising_line(error.__traceback__)
    if not isinstance(error, HFTrainError):
        cause: HFTrainError | None = _refused_call(error) or _no_main_guard(error)
        if cause is None and "batch" in facts:
            batch = facts["batch"]
            cause = (
                explain_unused(error, model)
                or _lightnings_attribute(task, error)
                or _unusable_loss(task, model, error, facts, loss_maker)
                or _unusable_batch(task, error, batch)
                or _missing_column(task, error, batch, datasets)
                or _refused_column(task, model, error, batch, label_names)
                or explain_torch(error, model, batch)
            )
        if cause is not None:
            if place is not None:
                add_note(cause, f"At {place}")
            raise cause from error
    owner = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and isinstance(owner, nn.Module):
        parts = ", ".join(name for name, _ in owner.named_children())
        add_note(error, f"{type(owner).__name__} has the children {parts or '(none)'}.")
    if "batch" in facts:
        add_note(error, f"The batch: {describe(facts['batch'])}.")
    # If the user's own line raised the error, Python's traceback already ends there.
    last = _last_frame(error)
    if place is not None and last and not isinstance(error, HFTrainError) and f"{last.filename}:" not in place:
        add_note(error, f"At {place}")


def _last_frame(error: Exception) -> traceback.FrameSummary | None:
    return next(iter(traceback.extract_tb(error.__traceback__, limit=-1)), None)


def _refused_call(error: Exception) -> TaskError | None:
    """Return an error for an override that takes or returns something else than the Trainer's call of it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    frames = [frame for frame in frames if frame.f_globals.get("__name__") != "torch._tensor"]
    last = frames[-1] if frames else None
    if last is None or not last.f_globals.get("__name__", "").startswith("hftrain."):
        return None
    text = str(error)
    if ("unpack" in text or "iteration over a 0-d tensor" in text) and last.f_code.co_name in _UNPACKED:
        name, parts = _UNPACKED[last.f_code.co_name]
        return TaskError(f"Cannot use what {name} returned:", f"{text}.", f"Return {parts}.")
    refused = _REFUSED.match(text) if isinstance(error, TypeError) else None
    name = "" if refused is None else refused[1].rpartition(".")[2]
    if refused is None or name not in _DOCUMENTED:
        return None
    return TaskError(
        f"Cannot call {refused[1].replace('.<locals>', '')} ({refused[2]}):",
        f"the Trainer calls it as {name}{_DOCUMENTED[name]}.",
        "Give it these parameters.",
    )


def _no_main_guard(error: Exception) -> HFTrainError | None:
    if not isinstance(error, RuntimeError) or "bootstrapping phase" not in str(error):
        return None
    return StrategyError(
        "Cannot start processes:",
        "a spawned process runs the script's top level again, and that starts the training once more.",
        "Put what the script does under `if __name__ == '__main__':`.",
    )


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
    task: TaskModule, model: nn.Module, error: Exception, facts: Mapping[str, Any], maker: str | None
) -> TaskError | None:
    """Return an error if the loss of a step is none that can be differentiated."""
    if "loss" not in facts:
        return None
    loss = facts["loss"]
    if maker is None:
        is_plain = isinstance(task, ModelTask)
        maker = f"{type(model).__name__}.forward" if is_plain else f"{type(task).__name__}.training_step"
    if not isinstance(loss, torch.Tensor):
        pair = " It must return (loss, outputs) only if return_outputs=True." if isinstance(loss, tuple) else ""
        return TaskError(
            f"Cannot train with what {maker} returned ({describe(loss)}):",
            "a loss is a tensor of one number.",
            f"Return the loss.{pair}",
        )
    asked = f"Cannot train with the loss that {maker} returned:"
    if loss.dim() > 0 and loss.numel() != 1:
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
    read = error.obj if isinstance(error, AttributeError) else None
    if isinstance(batch, Mapping) and isinstance(read, Mapping) and [*read] == [*batch]:
        return TaskError(
            f"Cannot read batch.{error.name} in {user}:",  # type: ignore[attr-defined]
            f"the batch is a {type(batch).__name__} with the columns {', '.join(map(str, batch))}.",
            f"Write batch[{error.name!r}], with a column of the batch.",  # type: ignore[attr-defined]
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


def _missing_column(task: TaskModule, error: Exception, batch: Any, datasets: Sequence[Any]) -> TaskError | None:
    """Return an error if a step looked up a name that its batch does not have."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(name, str) or not isinstance(batch, Mapping) or name in batch:
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
    task: TaskModule, model: nn.Module, error: Exception, batch: Any, label_names: Sequence[str]
) -> TaskError | None:
    """Return an error if a plain model's forward does not accept the columns of the batch."""
    if not isinstance(error, TypeError) or not isinstance(task, ModelTask) or not isinstance(batch, Mapping):
        return None
    if type(model).forward is nn.Module.forward:
        return TaskError(
            f"Cannot call {type(model).__name__}:", "it does not define forward.", "Define forward(self, ...)."
        )
    # The call itself must have failed, not code inside forward.
    if not str(error).startswith(f"{getattr(model.forward, '__qualname__', 'forward')}() "):
        return None
    taken = list(inspect.signature(model.forward).parameters)
    others = [name for name in batch if name not in taken]
    remedy = "Rename the columns, or leave them out."
    if any(name in label_names for name in others):
        remedy = (
            "Let forward take the labels and return the loss first, pass compute_loss_func, override compute_loss, or "
            "write a TaskModule."
        )
    return TaskError(
        f"Cannot call {type(model).__name__}.forward with the batch ({str(error).partition(') ')[2] or error}):",
        f"the batch has the columns {', '.join(map(str, batch))}, and forward takes {', '.join(taken)}.",
        remedy,
    )
