"""Recurrent state passed from one evaluation step to the next (`past_index`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrain.core.errors import TaskError
from hftrain.core.tree import detach


def with_memory(inputs: Any, past: Any) -> Any:
    """Return a batch with the previous step's recurrent state under ``"mems"``."""
    if not isinstance(inputs, Mapping):
        raise TaskError(
            "Cannot use past_index.",
            f"The batch is a {type(inputs).__name__}, to which no 'mems' can be added.",
            "Let the collator return a dict.",
        )
    return {**inputs, "mems": past}


def read_memory(outputs: Any, index: int, *, has_loss: bool) -> Any:
    """Return output number `index`, detached from its graph; indices count the loss as output 0.

    Args:
        has_loss: Whether a tuple begins with the loss; ignored for a mapping, whose keys show it.
    """
    values = list(outputs.values()) if isinstance(outputs, Mapping) else outputs
    if not ("loss" in outputs if isinstance(outputs, Mapping) else has_loss):
        index -= 1
    if not isinstance(values, (list, tuple)) or not 0 <= index < len(values):
        count = len(values) if isinstance(values, (list, tuple)) else 1
        raise TaskError(
            "Cannot use past_index.",
            f"The model returned {count} outputs, and none at place {index}.",
            "Let it be the place of the memory among the outputs, the loss counted as 0.",
        )
    return detach(values[index])
