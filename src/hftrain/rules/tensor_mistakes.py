"""torch's errors about labels, ids and devices, explained with the numbers that are at fault."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch

from hftrain.core.errors import TaskError

_NO_CUDA = ("not compiled with CUDA", "No CUDA GPUs are available", "Found no NVIDIA driver")
_MIXED = ("to be on the same device", "is not on the expected device")
_FLOAT_LABELS = ("expected target dtype to be Long", "expected scalar type Long")


def explain_tensors(error: Exception, frames: list[FrameType]) -> TaskError | None:
    """Return an error in the user's terms for one of torch's, None if its cause is not known for certain.

    Args:
        error: What a step raised.
        frames: The frames of its traceback, the outermost first.
    """
    text = str(error)
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


def _arguments_of(frames: list[FrameType], *names: str) -> dict[str, Any]:
    """Return the arguments of the innermost call of one of torch's functions, none if there is no such call."""
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
        f"the labels are {str(labels.dtype).removeprefix('torch.')}, and class numbers are integers.",
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
