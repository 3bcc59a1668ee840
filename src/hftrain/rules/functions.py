"""Check that functions given to a Trainer can be called as it will call them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from hftrain.core.errors import ConfigError, TaskError, a_kind

# Role -> the number of positional arguments, a keyword that may be passed, and the signature for errors.
_CALLS: dict[str, tuple[int, str, str]] = {
    "compute_loss_func": (2, "num_items_in_batch", "(outputs, labels, num_items_in_batch=None)"),
    "compute_metrics": (
        1,
        "compute_result",
        "(prediction), an EvalPrediction: prediction has predictions and label_ids",
    ),
    "data_collator": (
        1,
        "",
        "(samples), with a list of samples; datasets go by name (train_dataset=...)",
    ),
    "schedule.step": (0, "", "(), after each update; make timm's step_update(count) the step() of an object around it"),
    "preprocess_logits_for_metrics": (2, "", "(logits, labels)"),
}


def check_callable(role: str, function: Any) -> None:
    """Raise unless a value can be called."""
    if not callable(function):
        remedy = f"Pass a function, which is called as {role}{_CALLS[role][2]}" if role in _CALLS else "Pass a function"
        remedy += ", or override compute_loss" if role == "compute_loss_func" else ""
        raise ConfigError(f"Cannot use {a_kind(function)} as {role}:", "it is not callable.", f"{remedy}.")


def check_call(role: str, function: Callable[..., Any]) -> None:
    """Raise if a function cannot be called with the arguments of its role; those of unknown roles are not checked.

    Raises:
        ConfigError: It cannot be called at all.
        TaskError: It takes other arguments, or is a module class instead of an instance.
    """
    check_callable(role, function)
    if role not in _CALLS:
        return
    num_positional, keyword, written = _CALLS[role]
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(function, type) and issubclass(function, nn.Module):
        raise TaskError(f"Cannot use the class {name} as {role}:", "calling it makes a module.", f"Pass {name}().")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C
        return
    reason = ""
    for keywords in ({}, {keyword: None} if keyword else {}):
        try:
            signature.bind(*[None] * num_positional, **keywords)
            return
        except TypeError as error:
            reason = reason or str(error)
    raise TaskError(
        f"Cannot call {name} as {role} ({reason}):",
        f"it is called as {role}{written}.",
        f"Pass an instance: {name}()." if isinstance(function, type) else "Give it these parameters.",
    )
