"""What to do about the errors of torch that newcomers meet most in a step, by their messages: one table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# Patterns of messages, and what these do not say; {got} is a group of the pattern, {ranges} and so on are of `_Facts`.
_HINTS = {
    r"index out of range in self|must match the": "{positions}",
    r"index out of range in self": (
        "An id is not in its table. In the batch, {ranges}. {tables}Resize the model's embeddings to the tokenizer "
        "(model.resize_token_embeddings(len(tokenizer))), or check which ids the collator pads with."
    ),
    r"Target (?:-?\d+) is out of bounds": (
        "In the batch, {ranges}. {outputs}Give the model as many outputs as there are classes, or number the classes "
        "from 0; -100 marks positions without a label."
    ),
    r"device-side assert": (
        "Most likely a label or an id is out of range. Train with use_cpu=True to see which; number classes from 0, "
        "and resize the embeddings to the tokenizer."
    ),
    r"not compiled with CUDA|No CUDA GPUs|no NVIDIA driver|on the same device|on the expected device": (
        "The Trainer places the model and the batch: remove .cuda() and .to('cuda'), create other tensors on the "
        "device of the batch, or register them as buffers of the model."
    ),
    r"backward through the graph a second time": (
        "Return the loss without calling backward(), which the Trainer does; detach() what is kept from one step to "
        "the next, such as a hidden state."
    ),
    r"mat1 and mat2 shapes cannot be multiplied \(\d+x(?P<got>\d+) and (?P<wanted>\d+)x(?P<out>\d+)\)": (
        "{linear}The input has {got} features in its last dimension, which must be {wanted}. Give nn.Linear "
        "in_features={got}, or change the shape of what it gets."
    ),
    r"same dtype, but got|Input type \(|expected scalar type \w+ but|RNN input dtype|mixed dtype \(C": (
        "The model's weights are {weights}, and a column of the batch is not. Convert it in the dataset or the "
        "collator: x.to(torch.{weights}), or x.float() / 255 for images. NumPy arrays are float64 by default."
    ),
    r"must be Tensor, not \S*(?:tuple|dict|Output|Encoding)|'(?:tuple|list)' object has no attribute "
    r"'(?:size|shape|dtype|dim|view|mean)'": (
        "Take the tensor out of it: outputs[0], or outputs['logits']; of a batch, batch['x'] or model(**batch)."
    ),
    r"DataLoader worker .* (?:is killed|exited)": (
        "If the kernel killed it, memory is the likely cause: use fewer workers (dataloader_num_workers), a smaller "
        "dataloader_prefetch_factor, or smaller samples. dataloader_num_workers=0 shows an error where it happens."
    ),
    r"DataLoader timed out": "Look at what loading a batch waits for, or raise dataloader_timeout.",
}


def hint_for(error: Exception, model: nn.Module, batch: Any) -> str | None:
    """Return what to do about an error; None if its message is not one of the known ones.

    Args:
        error: The error of a step.
        model: The network.
        batch: The batch of the step; None if there was none.
    """
    for pattern, hint in _HINTS.items():
        told = re.search(pattern, str(error))
        if told is not None and (text := hint.format_map(_Facts(told, model, batch))):
            return text
    return None


class _Facts(dict[str, str]):
    """What hints mention of the message, the model and the batch; looked up only if they do."""

    def __init__(self, told: re.Match[str], model: nn.Module, batch: Any) -> None:
        super().__init__(told.groupdict())
        self._model, self._batch, self._config = model, batch, getattr(model, "config", None)

    def __missing__(self, name: str) -> str:
        return str(getattr(self, f"_{name}")())

    def _ranges(self) -> str:
        columns = dict(self._batch) if isinstance(self._batch, Mapping) else dict(enumerate(self._batch or ()))
        tensors = {name: each for name, each in columns.items() if isinstance(each, torch.Tensor) and each.numel()}
        found = [(name, each) for name, each in tensors.items() if not each.is_floating_point()]
        return ", ".join(f"{name} go from {int(each.min())} to {int(each.max())}" for name, each in found)

    def _outputs(self) -> str:
        number = getattr(self._config, "num_labels", None)
        return f"The model has {number} outputs. " if isinstance(number, int) else ""

    def _modules(self, kind: type) -> dict[str, Any]:
        return {name: each for name, each in self._model.named_modules() if isinstance(each, kind)}

    def _tables(self) -> str:
        sizes = {name: each.num_embeddings for name, each in self._modules(nn.Embedding).items()}
        return "".join(f"{name} has {size} rows (ids 0 to {size - 1}). " for name, size in sizes.items())

    def _positions(self) -> str:
        size = getattr(self._config, "max_position_embeddings", None)
        ids = self._batch.get("input_ids") if isinstance(self._batch, Mapping) else None
        if not isinstance(size, int) or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] <= size:
            return ""
        remedy = f"Truncate the texts: tokenizer(..., truncation=True, max_length={size})."
        return (
            f"The batch has {ids.shape[1]} positions, and the model {size} (config.max_position_embeddings). {remedy}"
        )

    def _linear(self) -> str:
        sizes = int(self["wanted"]), int(self["out"])
        layers = self._modules(nn.Linear).items()
        fitting = [name for name, each in layers if (each.in_features, each.out_features) == sizes]
        return f"In {' or '.join(fitting)} = Linear{sizes}: " if fitting else ""

    def _weights(self) -> str:
        kinds = (each.dtype for each in self._model.parameters() if each.is_floating_point())
        return str(next(kinds, torch.float32)).removeprefix("torch.")
