"""torch's errors in a step, explained: by its message, the batch and the model, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import TaskError
from hftrain.core.notes import describe

Parts = tuple[str, str, str]

_MIXED = "The Trainer moves the model and the batch. Create other tensors on the device of the batch, or register them "
_CLASSES = (
    "Class numbers need the scores' shape without dimension 1, which holds the classes: (4,) for scores (4, 3). Use "
    "labels.flatten() for a column, labels.argmax(1) for one-hot labels; if the classes come last, flatten both: "
    "scores.flatten(0, 1), labels.flatten()."
)
_BACKWARD = "Cannot run the backward pass of the loss:"
# C++ names of dtypes, which torch's messages mix with its own.
_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "c10::half": "float16", "c10::bfloat16": "bfloat16",
    "long": "int64", "long int": "int64", "int": "int32", "byte": "uint8", "unsigned char": "uint8", "char": "int8",
}  # fmt: skip

# Patterns of messages; {0} and so on are the groups.
_SAID: dict[str, Parts] = {
    r"backward through the graph a second time": (
        _BACKWARD,
        "a part of its graph has been freed by an earlier backward().",
        "Return the loss without calling backward(), which the Trainer does; detach() what is kept from one step to "
        "the next, such as a hidden state.",
    ),
    r"modified by an inplace operation: ([^;]*)": (
        _BACKWARD,
        "a tensor that it needs was changed in place after it was used ({0}).",
        "Replace x.add_(y), x += y and x[i] = y in the step or the model by x = x + y or x.clone(); "
        "torch.autograd.set_detect_anomaly(True) shows which line made the tensor.",
    ),
    r"leaf Variable that requires grad": (
        "Cannot change a parameter in place in a step:",
        "autograd records what is done to it.",
        "Change it under torch.no_grad(), or in a TrainerCallback, or leave it to the optimizer.",
    ),
    r"not compiled with CUDA|No CUDA GPUs are available|Found no NVIDIA driver": (
        "Cannot move a tensor to CUDA in a step:",
        "torch finds no GPU here.",
        "Remove .cuda() and .to('cuda'): the Trainer places the model and the batch. Create other tensors on the "
        "device of the batch.",
    ),
    r"^(.*(?:to be on the same device|is not on the expected device)[^\n]*?)[.!]?$": (
        "Cannot compute with tensors on different devices:", "{0}.", f"{_MIXED}as buffers of the model.",
    ),
    r"device-side assert": (
        "Cannot run a step on this GPU:",
        "one of its kernels met an index out of range, most likely a label or an id.",
        "Train with use_cpu=True to see which; number classes from 0, and resize the embeddings to the tokenizer.",
    ),
    r"softmax\w*\W+not implemented for '(\w+)'": (
        "Cannot compute the cross entropy:", "the scores are {0}, and must be floating-point numbers.",
        "cross_entropy(scores, labels) takes the model's outputs first, then the labels.",
    ),
    r"Can't call numpy\(\) on Tensor that requires grad": (
        "Cannot convert a tensor of the graph to NumPy in a step:", "gradients do not pass through NumPy.",
        "Compute the loss with torch; tensor.detach().cpu().numpy() is for values that are only looked at.",
    ),
    r"all elements of (?:input|target) should be between 0 and 1": (
        "Cannot compute the binary cross entropy:",
        "the scores or the labels are not probabilities.",
        "Use binary_cross_entropy_with_logits (BCEWithLogitsLoss), which takes a model's outputs as they are; labels "
        "are 0 or 1.",
    ),
    r"result type Float can't be cast to the desired output type Long|Found dtype Long but expected Float": (
        "Cannot compute the loss:", "the labels are int64, and this loss needs floating-point numbers.",
        "Convert them: labels.float(). For class numbers use cross_entropy.",
    ),
    r"(multi-target not supported|only batches of spatial targets|class probabilities, got \w+|"
    r"Expected input batch_size .*?|Expected target size .*?)\.?$": (
        "Cannot compute the cross entropy:", "the labels do not have the shape or the dtype that the scores need "
        "({0}).", _CLASSES,
    ),
    r"Target size \(torch.Size\(\[(.*?)\]\)\) must be the same as input size \(torch.Size\(\[(.*?)\]\)\)": (
        "Cannot compute the binary cross entropy:", "the labels have the shape ({0}), and the scores ({1}).",
        "Give both one shape: scores.squeeze(-1), or labels[:, None]. For one class per sample use cross_entropy.",
    ),
    r"expected (?:target dtype to be|scalar type) Long(?: or Byte)?,? but (?:got|found) (\w+)": (
        "Cannot compute the cross entropy:", "the labels are {0}, and class numbers are integers.",
        "Convert them in the dataset or the collator (labels.long()); for regression use mse_loss.",
    ),
    r"'indices' to have one of the following scalar types.* got torch\.(?:cuda\.)?(\w+?)Tensor": (
        "Cannot look up an embedding:", "the ids are {0}, not integers.",
        "Convert them in the dataset or the collator (ids.long()).",
    ),
    r"Expected more than 1 value per channel when training": (
        "Cannot normalize a batch of one sample:",
        "batch normalization in training computes its statistics over the samples, and needs two or more.",
        "Set dataloader_drop_last=True if it is the last, incomplete batch of an epoch; otherwise make "
        "per_device_train_batch_size larger, or use nn.GroupNorm.",
    ),
    r"^(.*`(?:preds|target)`.*?)\.?$": (
        "Cannot update a metric:", "{0}.", "update(preds, target) takes the model's outputs first, then the "
        "labels; num_classes must be the number of outputs.",
    ),
    r"Using a target size .*?\[(.*?)\].* that is different to the input size .*?\[(.*?)\]": (
        "Cannot compute the loss:",
        "the labels have the shape ({0}) and the outputs ({1}), so each output would be compared with every label.",
        "Give both one shape: outputs.squeeze(-1), or labels[:, None].",
    ),
}  # fmt: skip


def explain_torch(error: Exception, model: nn.Module, batch: Any) -> TaskError | None:
    """Return an error that explains one of torch's, None if the cause is not certain.

    Args:
        error: The error of a step.
        model: The network.
        batch: The batch of the step.
    """
    if not isinstance(
        error, (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, UserWarning, ValueError)
    ):
        return None
    text = str(error)
    too_long = _too_long(model, batch) if "out of range in self" in text or "must match the" in text else None
    if too_long is not None:
        return TaskError(*too_long)
    for pattern, said in _SAID.items():
        told = re.search(pattern, text, re.M)
        if told is not None:
            values = [_dtype(value) for value in told.groups()]
            return TaskError(*(part.format(*values) if "{0}" in part else part for part in said))
    for pattern, explain in _COMPUTED.items():
        told = re.search(pattern, text)
        parts = None if told is None else explain(told, model, batch)
        if parts is not None:
            return TaskError(*parts)
    return None


def _too_long(model: nn.Module, batch: Any) -> Parts | None:
    """Return an error if the batch has more positions than the model, according to the model's config."""
    config = getattr(model, "config", None)
    size = getattr(config, "max_position_embeddings", None)
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(size, int) or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] <= size:
        return None
    return (
        f"Cannot run {type(model).__name__} on {ids.shape[1]} positions:",
        f"it has {size} (config.max_position_embeddings).",
        f"Truncate the texts: tokenizer(..., truncation=True, max_length={size}).",
    )


def _label(told: re.Match[str], model: nn.Module, batch: Any) -> Parts:
    outputs = getattr(getattr(model, "config", None), "num_labels", None)
    known = f"the model has {outputs} outputs (labels 0 to {outputs - 1})" if isinstance(outputs, int) else ""
    known = known or "a label must be at least 0 and less than the number of outputs"
    return (
        "Cannot compute the loss:",
        f"the label {told[1]} is out of range: {known}. In the batch, {_ranges(batch)}.",
        "Give the model as many outputs as there are classes, or number the classes from 0; -100 marks positions "
        "without a label.",
    )


def _id(_: re.Match[str], model: nn.Module, batch: Any) -> Parts:
    tables = {name: each.num_embeddings for name, each in model.named_modules() if isinstance(each, nn.Embedding)}
    rows = ", ".join(f"{name} has {num} rows (ids 0 to {num - 1})" for name, num in tables.items())
    return (
        "Cannot look up an embedding:",
        f"an id is not in its table. In the batch, {_ranges(batch)}{f'; {rows}' if rows else ''}.",
        "Resize the model's embeddings to the tokenizer (model.resize_token_embeddings(len(tokenizer))), or check "
        "which ids the collator pads with.",
    )


def _width(told: re.Match[str], model: nn.Module, _: Any) -> Parts:
    got, wanted, out = (int(told[place]) for place in (2, 3, 4))
    linear = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    fitting = [name for name, each in linear.items() if (each.in_features, each.out_features) == (wanted, out)]
    asked = (
        f"Cannot apply {' or '.join(fitting)} = Linear({wanted}, {out}):" if fitting else "Cannot multiply matrices:"
    )
    reason = f"its input has {got} features in the last dimension, which must be {wanted}."
    return asked, reason, f"Give nn.Linear in_features={got}, or change the shape of what it gets."


def _types(told: re.Match[str], model: nn.Module, batch: Any) -> Parts | None:
    weight = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    columns = [(name, tensor) for name, tensor in _tensors(batch) if tensor.dtype != weight and name != "labels"]
    kinds = [_dtype(each) for each in told.groups()]
    columns = [(name, tensor) for name, tensor in columns if not kinds or _dtype(str(tensor.dtype)) in kinds]
    wanted = _dtype(str(weight))
    if not columns:
        reason = f"{' and '.join(kinds)} do not go together." if kinds else "their dtypes differ."
        return "Cannot compute with tensors of different dtypes:", reason, f"Convert the input (x.to(torch.{wanted}))."
    name, tensor = columns[0]
    remedy = f"Convert it in the dataset or the collator ({name}.to(torch.{wanted}))."
    if tensor.dtype is torch.float64:
        remedy = f"NumPy arrays are float64 by default: c{remedy[1:]}"
    elif tensor.dtype is torch.uint8:
        remedy = f"Make images floating point: {name}.float() / 255."
    reason = f"its {name} is {_dtype(str(tensor.dtype))}, and the model's weights are {wanted}."
    return f"Cannot run {type(model).__name__} on this batch:", reason, remedy


def _channels(told: re.Match[str], model: nn.Module, batch: Any) -> Parts:
    shape, wanted = told[2], told[3]
    is_last = shape.rpartition(", ")[2] == wanted
    remedy = "The channels come last: permute the samples (x.permute(2, 0, 1))." if is_last else ""
    reason = f"its input has the shape ({shape}), and dimension 1, the channels, must be {wanted}."
    return "Cannot apply a convolution:", reason, remedy or "Change in_channels, or the images."


def _sizes(told: re.Match[str], model: nn.Module, batch: Any) -> Parts:
    remedy = f"Change the layer's size, or the shape of its input. The batch: {describe(batch)}."
    return "Cannot apply a layer:", f"{told[0]}.", remedy


def _no_tensor(told: re.Match[str], model: nn.Module, batch: Any) -> Parts | None:
    function, argument, kind = told.groups()
    columns = batch if isinstance(batch, Mapping) else {}
    names = ", ".join(map(str, columns))
    kind = kind.rpartition(".")[2]
    asked, reason = f"Cannot pass {kind} as {argument!r} to {function}():", "it must be a tensor."
    same = [name for name, column in columns.items() if type(column).__name__ == kind]
    if kind == "NoneType" and argument == "target" and columns:
        remedy = "Add the labels to the dataset, or let forward compute no loss without them."
        return "Cannot compute the loss:", f"the labels are None: the batch has the columns {names}.", remedy
    if kind == "str" and columns and not same:
        return asked, reason, f"Unpacking a dict gives its names ({names}): write x = batch['x'] for each column."
    if columns and kind == type(batch).__name__:
        return asked, reason, f"If it is the whole batch, pass its columns: model(**batch), or batch[...] ({names})."
    if same:
        remedy = "Let the dataset or the collator make tensors of them (torch.as_tensor, torch.stack)."
        return asked, f"the batch's {', '.join(same)} are not tensors: {describe(batch)}.", remedy
    if kind == "NoneType":
        return asked, reason, "Check that each forward ends with return, and that the batch has what forward takes."
    if kind in ("tuple", "dict", "list") or "Output" in kind:
        return asked, reason, "Take the tensor out of it: outputs[0], or outputs['logits']."
    return None


def _not_a_tensor(told: re.Match[str], model: nn.Module, batch: Any) -> Parts:
    remedy = f"Check what the model returns, and the columns of the batch ({describe(batch)})."
    if told[1] != "NoneType":
        remedy = "Take the tensor out of it: outputs[0], or outputs['logits']."
    return "Cannot run a step:", f"a {told[1]} is used as a tensor.", remedy


def _uniform(told: re.Match[str], model: nn.Module, batch: Any) -> Parts:
    names: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(_dtype(str(parameter.dtype)), name)
    found = ", ".join(f"{name} {dtype}" for dtype, name in names.items())
    remedy = "Convert the model to one dtype (model.float()) before you make the Trainer; precision='bf16' casts."
    return "Cannot shard the model with FSDP:", f"parameters of one unit have different dtypes ({found}).", remedy


_COMPUTED: dict[str, Callable[[re.Match[str], nn.Module, Any], Parts | None]] = {
    r"expects uniform (?:original parameter )?dtype": _uniform,
    r"Target (-?\d+) is out of bounds": _label,
    r"index out of range in self": _id,
    r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)": _width,
    r"same dtype, but got:? (\S+) (?:and|!=) (\S+)": _types,
    r"Input type \((.+?)\) and (?:bias|weight) type \((.+?)\) should be the same": _types,
    r"expected scalar type (\w+) but found (\w+)": _types,
    r"RNN input dtype \((\S+)\) does not match weight dtype \((\S+)\)": _types,
    r"mixed dtype \(C": _types,
    r"weight of size \[(.*?)\], expected input\[(.*?)\] to have (\d+) channels": _channels,
    r"Expected [^.]* input to conv\w+, but got input of size: \[.*?\]": _sizes,
    r"expected input with shape \[.*?\], but got input of size ?\[.*?\]": _sizes,
    r"running_mean should contain \d+ elements not \d+": _sizes,
    r"input.size\(-1\) must be equal to input_size. Expected \d+, got \d+": _sizes,
    r"(\w+)\(\): argument '(\w+)' \(position \d+\) must be Tensor, not (\S+)": _no_tensor,
    r"'(tuple|list|NoneType)' object has no attribute '(?:size|shape|dtype|dim|view|mean)'": _not_a_tensor,
}


def _tensors(batch: Any) -> Iterator[tuple[str, torch.Tensor]]:
    columns = dict(batch) if isinstance(batch, Mapping) else {}
    if isinstance(batch, (list, tuple)):
        columns = {f"batch[{place}]": each for place, each in enumerate(batch)}
    yield from ((str(name), each) for name, each in columns.items() if isinstance(each, torch.Tensor))


def _ranges(batch: Any) -> str:
    """Describe the values of the batch's integers."""
    found = [(name, each) for name, each in _tensors(batch) if each.numel() and not each.is_floating_point()]
    said = ", ".join(f"{name} go from {int(each.min())} to {int(each.max())}" for name, each in found)
    return said or describe(batch)


def _dtype(text: str) -> str:
    bare = text.removeprefix("torch.")
    return _DTYPES.get(bare.lower(), bare)
