"""Explain torch's errors about a layer's input: a wrong shape or dtype, or something other than a tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import TaskError
from hftrain.core.notes import describe

_NO_TENSOR = re.compile(r"argument '(\w+)' \(position \d+\) must be Tensor, not (\S+)")
_SHAPE = ("cannot be multiplied", "size mismatch", "channels, but got", "normalized_shape", "batched (4D) input")
_DTYPE = ("must have the same dtype", "expected scalar type", "should be the same", "to have the same dtype")


def explain_layers(error: Exception, frames: list[FrameType], model: nn.Module, batch: Any) -> TaskError | None:
    """Return an error that names the layer and its input, None if the cause is not certain.

    Args:
        error: The error of a step.
        frames: The frames of its traceback, the outermost first.
        model: The network.
        batch: The batch of the step.
    """
    text = str(error)
    layer, value = _innermost(frames)
    refused = _NO_TENSOR.search(text) if isinstance(error, TypeError) else None
    if refused is not None:
        return _no_tensor(refused, frames, batch, "" if layer is None else _name(layer, model), value)
    if layer is None or not isinstance(value, torch.Tensor) or not isinstance(error, RuntimeError):
        return None
    weight = getattr(layer, "weight", None)
    asked = f"Cannot apply {_name(layer, model)}:"
    if isinstance(weight, torch.Tensor) and weight.dtype != value.dtype and any(each in text for each in _DTYPE):
        is_double = value.dtype is torch.float64
        made = "NumPy arrays are float64 by default: convert them in the dataset" if is_double else "Convert"
        reason = f"its input is {_dtype(value)}, and its weight {_dtype(weight)}."
        if value.dtype is torch.uint8:
            return TaskError(asked, reason, "Make images floating point: x.float() / 255.")
        return TaskError(asked, reason, f"{made} (x.to(torch.{_dtype(weight)})).")
    if not any(each in text for each in _SHAPE):
        return None
    shape = tuple(value.shape)
    if isinstance(layer, nn.Linear) and shape[-1:] != (layer.in_features,):
        reason = f"its input has the shape {shape}, and the last dimension must be {layer.in_features}."
        return TaskError(asked, reason, "Change in_features, or the shape of what it gets.")
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and len(shape) > 1 and shape[1] != layer.in_channels:
        last = shape[-1] == layer.in_channels
        reason = f"its input has the shape {shape}, and dimension 1, the channels, must be {layer.in_channels}."
        remedy = "The channels come last: permute the samples." if last else "Change in_channels, or the images."
        return TaskError(asked, reason, remedy)
    return TaskError(asked, f"its input has the shape {shape}.", f"torch says: {text.splitlines()[0].rstrip('.')}.")


def _innermost(frames: list[FrameType]) -> tuple[nn.Module | None, Any]:
    """Return the torch layer that raised the error, and its input; (None, None) if none did."""
    for frame in reversed(frames):
        owner, name = frame.f_locals.get("self"), frame.f_globals.get("__name__", "")
        if isinstance(owner, nn.Module) and name.startswith("torch.nn.modules") and frame.f_code.co_name == "forward":
            return owner, next((frame.f_locals[each] for each in ("input", "x") if each in frame.f_locals), None)
        if not name.startswith("torch."):
            return None, None
    return None, None


def _no_tensor(refused: re.Match[str], frames: list[FrameType], batch: Any, layer: str, value: Any) -> TaskError | None:
    """Return an error that names the object passed in place of a tensor, and its origin."""
    argument, kind = refused.groups()
    columns = batch if isinstance(batch, Mapping) else {}
    asked = f"Cannot apply {layer}:" if layer else f"Cannot pass {kind} as {argument!r} to a function of torch's:"
    reason = f"its {argument} is {describe(value)}, not a tensor." if layer else "it is not a tensor."
    if layer and isinstance(value, str) and value in columns:
        return TaskError(
            asked,
            f"its {argument} is the text {value!r}, the name of a column.",
            "Unpacking a dict gives its names: write x = batch['x'] for each column.",
        )
    if layer and value is batch and columns:
        return TaskError(
            asked,
            "its input is the whole batch.",
            f"Pass the columns: model(**batch), or batch[...]; it has {', '.join(map(str, columns))}.",
        )
    same = [name for name, column in columns.items() if type(column).__name__ == kind.rpartition(".")[2]]
    if same:
        remedy = "Let the dataset or the collator make tensors of them (torch.as_tensor, torch.stack)."
        return TaskError(asked, f"the batch's {', '.join(same)} are not tensors: {describe(batch)}.", remedy)
    if kind == "NoneType" and argument == "target" and columns:
        return TaskError(
            "Cannot compute the loss:",
            f"the labels are None: the batch has the columns {', '.join(map(str, columns))}.",
            "Add the labels to the dataset, or let forward compute no loss without them.",
        )
    if kind in ("tuple", "dict") or "Output" in kind:
        remedy = "Take the tensor out of it: outputs[0], or outputs['logits']."
        return TaskError(asked, reason, remedy)
    return None


def _name(layer: nn.Module, model: nn.Module) -> str:
    path = next((name for name, module in model.named_modules() if module is layer), "")
    text = repr(layer).partition("\n")[0]
    return f"{path} = {text}" if path else text


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
