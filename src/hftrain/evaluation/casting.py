"""Evaluate in another dtype (`fp16_full_eval`, `bf16_full_eval`): on copies of the weights, with inputs cast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from hftrain.core.tree import map_tensors


@contextmanager
def cast_weights(model: nn.Module, dtype: torch.dtype | None, *, keep_on: torch.device | None = None) -> Iterator[None]:
    """Run a model on copies of its floating-point weights in another dtype, then restore the original weights.

    Copies replace parameters and buffers in the modules. The original tensors keep their dtype: changing it would
    silently break hooks on their gradients, such as DDP's all-reduce.

    Args:
        dtype: The dtype of the copies; None changes nothing.
        keep_on: The device that holds the original weights meanwhile; None does not move them.
    """
    places: list[tuple[nn.Module, str, torch.Tensor]] = []
    copies: dict[int, torch.Tensor] = {}
    devices: list[tuple[torch.Tensor, torch.device]] = []
    for module in model.modules() if dtype is not None else ():
        # With every name: a module may hold one tensor under several.
        own: dict[str, Any] = {"recurse": False, "remove_duplicate": False}
        for name, tensor in chain(module.named_parameters(**own), module.named_buffers(**own)):
            if tensor.is_floating_point() and tensor.dtype is not dtype:
                places.append((module, name, tensor))
    try:
        for module, name, tensor in places:
            # Several modules may share one tensor.
            if id(tensor) not in copies:
                copy = tensor.detach().to(dtype)
                is_parameter = isinstance(tensor, nn.Parameter)
                copies[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
                if keep_on is not None and tensor.device != keep_on:
                    devices.append((tensor, tensor.device))
                    tensor.data = tensor.data.to(keep_on)
            setattr(module, name, copies[id(tensor)])
        copies.clear()
        yield
    finally:
        for tensor, device in devices:
            tensor.data = tensor.data.to(device)
        for module, name, tensor in places:
            setattr(module, name, tensor)


def cast_inputs(inputs: Any, dtype: torch.dtype, *, labels: list[str]) -> Any:
    """Return a batch with its floating-point tensors in `dtype`; labels keep their dtype."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if isinstance(inputs, Mapping):
        changed = {key: value if key in labels else map_tensors(value, cast) for key, value in inputs.items()}
        return {**inputs, **changed}
    return map_tensors(inputs, cast)


def full_eval_dtype(args: Any) -> torch.dtype | None:
    """Return the dtype to evaluate entirely in, None for the model's own."""
    if args.bf16_full_eval:
        return torch.bfloat16
    return torch.float16 if args.fp16_full_eval else None
