"""Explain errors of a step, a dataset or a collator: notes with what is known of them and what to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hftrain.core.elsewhere import names_elsewhere
from hftrain.core.errors import HFTrainError, TaskError
from hftrain.core.frames import raising_line
from hftrain.core.notes import add_note, describe, facts_of
from hftrain.core.signatures import plain_signature
from hftrain.core.tree import is_samples
from hftrain.extras.mistakes.hints import hint_for
from hftrain.extras.mistakes.in_data import locate_in_data
from hftrain.strategies.checks import explain_unused
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule


def explain_mistake(
    error: Exception, task: TaskModule, model: nn.Module, *, trainer: type, loss_maker: str | None
) -> None:
    """Add notes to an error: what to do, the place and the batch. Raise a `TaskError` for a loss that cannot be used.

    What is known of a step (its batch, its loss) was kept with the error where it passed, see `keep_facts`, so
    successful steps cost nothing, and errors of callbacks, metrics and schedules get no batch.

    Args:
        error: The error of a step, a collator, a dataset or a callback; notes are added to it.
        trainer: The class whose methods may be the user's.
        loss_maker: The name of the function that returned the loss, if it was neither the task nor the model.

    Raises:
        TaskError: A step uses a loss, a column or an attribute that it does not have; the error is its cause.
        StrategyError: A parameter got no gradient in DDP.
    """
    if isinstance(error, HFTrainError) and not isinstance(error, TaskError):
        return
    where = locate_in_data(error)
    if where is not None:
        add_note(error, where)
    if getattr(error, "__notes__", None):
        # Already explained, or not raised in a step.
        return
    facts = facts_of(error)
    if not isinstance(error, HFTrainError):
        cause: HFTrainError | None = None
        if "batch" in facts:
            cause = explain_unused(error, model) or _missing(task, error, facts["batch"])
        if "loss" in facts:
            is_plain = isinstance(task, ModelTask)
            own = f"{type(model).__name__}.forward" if is_plain else f"{type(task).__name__}.training_step"
            cause = cause or _unusable_loss(facts["loss"], loss_maker or own)
        if cause is not None:
            if place := raising_line(error):
                add_note(cause, f"At {place}")
            raise cause from error
        hint = _refused_call(error, trainer) or hint_for(error, model, facts.get("batch"))
        if hint is not None:
            add_note(error, hint)
    owner = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and isinstance(owner, nn.Module):
        parts = ", ".join(name for name, _ in owner.named_children())
        add_note(error, f"{type(owner).__name__} has the children {parts or '(none)'}.")
    if "batch" in facts:
        add_note(error, _of_batch(task, model, error, facts["batch"]))
    if not isinstance(error, HFTrainError) and (place := raising_line(error, only_above=True)):
        add_note(error, f"At {place}")


def _refused_call(error: Exception, trainer: type) -> str | None:
    """Return how a method of the user's Trainer is called, if the error is that it cannot be called so."""
    told = re.match(r"(\S+)\(\) (?:missing|takes|got) ", str(error)) if isinstance(error, TypeError) else None
    name = "" if told is None else told[1].rpartition(".")[2]
    base = next(each for each in trainer.__mro__ if each.__module__.startswith("hftrain."))
    if told is None or not hasattr(base, name) or getattr(getattr(trainer, name), "__qualname__", "") != told[1]:
        return None
    return f"The Trainer calls it as {name}{plain_signature(getattr(base, name))}. Give it these parameters."


def _missing(task: TaskModule, error: Exception, batch: Any) -> TaskError | None:
    """Return an error if a step looked up a column that its batch does not have, or an attribute of Lightning's."""
    kind, name = type(task).__name__, getattr(error, "name", None)
    if getattr(error, "obj", None) is task and (answer := names_elsewhere("module_attributes").get(str(name))):
        return TaskError(f"Cannot use {kind}.{name}:", "a TaskModule does not have it.", answer)
    column = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(column, str) or not isinstance(batch, Mapping) or column in batch:
        return None
    return TaskError(
        f"Cannot give {kind} the column {column!r}:",
        f"the batch does not contain it. It contains: {describe(batch)}.",
        "Rename the dataset's column, or add it. If the dataset has it, the collator left it out, as the default one "
        "does with text and None: tokenize texts before training (dataset.map), number labels, or pass a "
        "data_collator that does.",
    )


def _unusable_loss(loss: Any, maker: str) -> TaskError | None:
    """Return an error if the loss of a step is none that can be differentiated."""
    asked = f"Cannot train with the loss that {maker} returned:"
    if not isinstance(loss, torch.Tensor):
        pair = " It must return (loss, outputs) only if return_outputs=True." if isinstance(loss, tuple) else ""
        return TaskError(asked, f"it is not a tensor ({describe(loss)}).", f"Return a tensor of one number.{pair}")
    if loss.numel() != 1:
        return TaskError(
            asked, f"it has the shape {tuple(loss.shape)}, but a loss must be one number.", "Return its mean."
        )
    if loss.is_complex():
        return TaskError(asked, "it is complex, but a loss must be real.", "Return its abs() or its real part.")
    if loss.requires_grad:
        return None
    if not torch.is_grad_enabled():  # here too, outside of the step
        return TaskError(asked, "no gradients are computed.", "Call train() outside of torch.no_grad().")
    return TaskError(
        asked,
        "it does not depend on any trainable parameter.",
        "Compute it from the model's outputs without detach(), item(), argmax() or torch.no_grad(), and leave some of "
        "the parameters that it depends on with requires_grad=True.",
    )


def _of_batch(task: TaskModule, model: nn.Module, error: Exception, batch: Any) -> str:
    """Describe the batch of a step, and what to do if it is none or its columns cannot be taken."""
    if batch is None:
        return "The data_collator returned None as a batch. Let it return the batch."
    if is_samples(batch):
        join = "{'x': torch.stack([sample['x'] for sample in samples]), ...}"
        return f"The data_collator returned a list of samples ({describe(batch)}). Let it join them: {join}."
    remedy = ""
    if isinstance(batch, (list, tuple)) and isinstance(error, TypeError):
        names = "Its samples have no names: let the dataset return dicts, such as {'x': ..., 'labels': ...}, or"
        remedy = f" {names} {'write a TaskModule' if isinstance(task, ModelTask) else 'unpack it: x, y = batch'}."
    # The call itself must have failed, not code inside forward.
    elif isinstance(error, TypeError) and str(error).startswith(f"{getattr(model.forward, '__qualname__', '')}() "):
        remedy = (
            f" {type(model).__name__}.forward takes {', '.join(inspect.signature(model.forward).parameters)}. Rename "
            "or leave out the other columns. Let forward take the labels and return the loss first, pass "
            "compute_loss_func, override compute_loss or write a TaskModule."
        )
    return f"The batch: {describe(batch)}.{remedy}"
