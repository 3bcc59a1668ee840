"""Prepare a model for an evaluation and restore it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hftrain.core.log import warn_once
from hftrain.core.tree import map_tensors
from hftrain.evaluation.generating import switch_cache_off
from hftrain.step.stepper import Computing
from hftrain.strategies.base import Strategy
from hftrain.task.metric_state import checked_metrics
from hftrain.task.module import TaskModule


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
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_floating_point() and tensor.dtype is not dtype:
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


@contextmanager
def ready(
    task: TaskModule,
    model: nn.Module,
    *,
    strategy: Strategy,
    computing: Computing,
    dtype: torch.dtype | None,
    keeps_cache: bool,
    place: Callable[[], None] | None,
    wrap: Callable[[nn.Module], nn.Module],
) -> Iterator[None]:
    """Put a task's unwrapped model into evaluation mode; restore weights, modes and casting afterwards.

    Args:
        model: The task's unwrapped model.
        dtype: The dtype that weights and inputs are cast to; None keeps the precision's behaviour.
        keeps_cache: Leave the cache of keys and values as the model's configuration has it.
        place: Places and compiles the model; None if it is being trained.
        wrap: The documented `_wrap_model`, for evaluation.
    """
    # Cast before placing: the original weights stay in host memory, and the device holds only the smaller copies.
    with cast_weights(model, dtype, keep_on=None if place is None else torch.device("cpu")):
        if place is not None:
            place()
        wrapped, modes = task.model, [(module, module.training) for module in task.modules()]
        task.model = wrap(wrapped)
        task.eval()
        for metric in checked_metrics(task, "eval").values():
            metric.reset()
        before = computing.past, computing.input_dtype, computing.autocast
        computing.past = None
        if dtype is not None:
            computing.input_dtype, computing.autocast = dtype, nullcontext
        put_cache_back = None if keeps_cache else switch_cache_off(model)
        try:
            yield
        finally:
            if put_cache_back is not None:
                put_cache_back()
            computing.past, computing.input_dtype, computing.autocast = before
            if getattr(task.model, "training", False):
                warn_once(
                    f"{type(task.model).__name__} was put into training mode during the evaluation: dropout and batch "
                    "statistics were active. Remove .train() from the evaluation; modes are set for you."
                )
            strategy.after_evaluation(wrapped)
            task.model = wrapped
            for module, was_training in modes:
                module.training = was_training
