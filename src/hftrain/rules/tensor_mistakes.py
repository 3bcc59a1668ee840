"""Explain torch's errors about labels, ids and devices, with the invalid values."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import TaskError

_NO_CUDA = ("not compiled with CUDA", "No CUDA GPUs are available", "Found no NVIDIA driver")
_MIXED = ("to be on the same device", "is not on the expected device")
_FLOAT_LABELS = ("expected target dtype to be Long", "expected scalar type Long")
_SHAPES = ("multi-target not supported", "to match target batch_size", "spatial targets", "Expected target size")
_TOO_LONG = ("must match the existing size", "must match the size of tensor")


def explain_tensors(error: Exception, frames: list[FrameType], model: nn.Module, batch: Any) -> TaskError | None:
    """Return an error that explains one of torch's, None if the cause is not certain.

    Args:
        error: The error of a step.
        frames: The frames of its traceback, the outermost first.
        model: The network.
        batch: The batch of the step.
    """
    text = str(error)
    if "index out of range in self" in text or any(each in text for each in _TOO_LONG):
        too_long = _too_long(model, batch, _arguments_of(frames, "embedding"))
        if too_long is not None:
            return too_long
    if isinstance(error, (RuntimeError, ValueError)) and any(each in text for each in _SHAPES):
        return _label_shape(_arguments_of(frames, "cross_entropy", "nll_loss"))
    wrong = _wrong_values(error, frames)
    if wrong is not None:
        return wrong
    if isinstance(error, IndexError) and "out of bounds" in text:
        return _label_out_of_range(_arguments_of(frames, "cross_entropy", "nll_loss"))
    if isinstance(error, IndexError) and "index out of range in self" in text:
        return _id_out_of_range(_arguments_of(frames, "embedding"))
    if isinstance(error, RuntimeError) and any(each in text for each in _FLOAT_LABELS):
        return _float_labels(_arguments_of(frames, "cross_entropy", "nll_loss"))
    if isinstance(error, (AssertionError, RuntimeError)) and any(each in text for each in _NO_CUDA):
        return TaskError(
            "Cannot move a tensor to CUDA in a step:",
            "torch finds no GPU here.",
            "Remove .cuda() and .to('cuda'): the Trainer places the model and the batch. Create other tensors on "
            "the device of the batch.",
        )
    if isinstance(error, RuntimeError) and any(each in text for each in _MIXED):
        return TaskError(
            "Cannot compute with tensors on different devices:",
            text.partition("\n")[0].rstrip(".!") + ".",
            "The Trainer moves the model and the batch. Create other tensors on the device of the batch, or register "
            "them as buffers of the model.",
        )
    return None


def _wrong_values(error: Exception, frames: list[FrameType]) -> TaskError | None:
    """Return an error for values that torch rejects: float ids, or scores that are not probabilities."""
    text = str(error)
    if isinstance(error, RuntimeError) and "'indices' to have one of the following scalar types" in text:
        return TaskError(
            "Cannot look up an embedding:",
            f"the ids are {_dtype(_arguments_of(frames, 'embedding').get('input'))}, not integers.",
            "Convert them in the dataset or the collator (ids.long()).",
        )
    if isinstance(error, RuntimeError) and "all elements of input should be between 0 and 1" in text:
        return TaskError(
            "Cannot compute the binary cross entropy:",
            "the scores are not probabilities.",
            "Use binary_cross_entropy_with_logits (BCEWithLogitsLoss), which takes a model's outputs as they are.",
        )
    if isinstance(error, RuntimeError) and _arguments_of(
        frames, "binary_cross_entropy", "binary_cross_entropy_with_logits"
    ):
        call = _arguments_of(frames, "binary_cross_entropy", "binary_cross_entropy_with_logits")
        if isinstance(call.get("target"), torch.Tensor) and not call["target"].is_floating_point():
            return TaskError(
                "Cannot compute the binary cross entropy:",
                f"the labels are {_dtype(call['target'])}, not floating-point numbers.",
                "Convert them: labels.float().",
            )
    if isinstance(error, RuntimeError) and "leaf Variable that requires grad" in text:
        return TaskError(
            "Cannot change a parameter in place in a step:",
            "autograd records what is done to it.",
            "Change it under torch.no_grad(), or in a TrainerCallback, or leave it to the optimizer.",
        )
    return None


def _dtype(tensor: Any) -> str:
    return str(getattr(tensor, "dtype", "of another type")).removeprefix("torch.")


def _too_long(model: nn.Module, batch: Any, call: dict[str, Any]) -> TaskError | None:
    """Return an error if the batch has more positions than the model, according to the model's config."""
    size = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(size, int) or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] <= size:
        return None
    weight = call.get("weight")
    if isinstance(weight, torch.Tensor) and weight.shape[0] == getattr(model.config, "vocab_size", None):
        # The error may be about token ids, which may also be out of range.
        return None
    return TaskError(
        f"Cannot run {type(model).__name__} on {ids.shape[1]} positions:",
        f"it has {size} (config.max_position_embeddings).",
        f"Truncate the texts: tokenizer(..., truncation=True, max_length={size}).",
    )


def _label_shape(call: dict[str, Any]) -> TaskError | None:
    scores, labels = call.get("input"), call.get("target")
    if not isinstance(scores, torch.Tensor) or not isinstance(labels, torch.Tensor) or scores.dim() < 2:
        return None
    wanted = (scores.shape[0], *scores.shape[2:])
    if tuple(labels.shape) == wanted:
        return None
    remedy = f"Class numbers need the shape {wanted}: the scores' without dimension 1, which holds the classes."
    if labels.dim() == scores.dim() and labels.is_floating_point():
        remedy = f"Class probabilities need the shape of the scores. {remedy}"
    elif labels.numel() == torch.Size(wanted).numel():
        remedy += f" Use labels.reshape({', '.join(map(str, wanted))})."
    elif scores.dim() == 3:
        remedy += " If the classes come last, pass scores.flatten(0, 1) and labels.flatten()."
    return TaskError(
        "Cannot compute the cross entropy:",
        f"the scores have the shape {tuple(scores.shape)}, and the labels {tuple(labels.shape)}.",
        remedy,
    )


def _arguments_of(frames: list[FrameType], *names: str) -> dict[str, Any]:
    """Return the arguments of the innermost call of one of torch's functions, empty if there is no such call."""
    for frame in reversed(frames):
        if frame.f_code.co_name in names and frame.f_globals.get("__name__") == "torch.nn.functional":
            return dict(frame.f_locals)
    return {}


def _label_out_of_range(call: dict[str, Any]) -> TaskError | None:
    scores, labels = call.get("input"), call.get("target")
    if not isinstance(scores, torch.Tensor) or not isinstance(labels, torch.Tensor) or not scores.dim():
        return None
    num_classes = scores.shape[1 if scores.dim() > 1 else 0]
    ignored = call.get("ignore_index", -100)
    counted = labels[labels != ignored]
    if not counted.numel() or (int(counted.min()) >= 0 and int(counted.max()) < num_classes):
        return None
    return TaskError(
        "Cannot compute the loss:",
        f"labels go from {int(counted.min())} to {int(counted.max())}, and the model has {num_classes} outputs "
        f"(labels 0 to {num_classes - 1}).",
        f"Give the model as many outputs as there are classes, or number the classes from 0; {ignored} marks positions "
        "without a label.",
    )


def _float_labels(call: dict[str, Any]) -> TaskError | None:
    labels = call.get("target")
    if not isinstance(labels, torch.Tensor) or not labels.is_floating_point():
        return None
    return TaskError(
        "Cannot compute the cross entropy:",
        f"the labels are {_dtype(labels)}, and class numbers are integers.",
        "Convert them in the dataset or the collator (labels.long()); for regression use mse_loss.",
    )


def _id_out_of_range(call: dict[str, Any]) -> TaskError | None:
    ids, weight = call.get("input"), call.get("weight")
    if not isinstance(ids, torch.Tensor) or not isinstance(weight, torch.Tensor) or not ids.numel():
        return None
    low, high, size = int(ids.min()), int(ids.max()), weight.shape[0]
    if low >= 0 and high < size:
        return None
    return TaskError(
        "Cannot look up an embedding:",
        f"ids go from {low} to {high}, and the table has {size} rows (ids 0 to {size - 1}).",
        "Resize the model's embeddings to the tokenizer (model.resize_token_embeddings(len(tokenizer))), or check "
        "which ids the collator pads with.",
    )
