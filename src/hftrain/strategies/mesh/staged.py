"""The states of a model that runs as a pipeline: each stage has, saves and loads what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hftrain.core.types import Shard
from hftrain.strategies.fsdp.states import pieces, scale_down
from hftrain.strategies.mesh.pipeline import Pipeline, grad_norm, whole_state

State = dict[str, Any]


def model_pieces(pipeline: Pipeline, state: Mapping[str, Any], *, is_main: bool) -> dict[str, Shard]:
    """Return this process's part of a model's state; of tensors with copies in several stages, the first writes."""
    stage, owners = pipeline.stage.index, pipeline.plan.owners
    own = {name: value for name, value in state.items() if owners.get(name, (0,))[0] == stage}
    return pieces(own, is_main=is_main)


def optimizer_pieces(pipeline: Pipeline, optimizer: Optimizer, *, is_writer: bool) -> tuple[State, dict[str, Shard]]:
    """Return an optimizer's groups, and this process's part of its state.

    Args:
        pipeline: The pipeline.
        optimizer: Its optimizer, over the parameters of all stages in their order.
        is_writer: Whether this process writes what all ranks of its stage hold whole, such as the number of steps.
    """
    state = optimizer.state_dict()
    own = {id(parameter) for _, parameter in pipeline.own_parameters(once=True)}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    flat = {
        f"{index}.{key}": value
        for index, entry in state["state"].items()
        if id(parameters[index]) in own
        for key, value in entry.items()
        if isinstance(value, torch.Tensor)
    }
    return {**state, "state": {}}, pieces(flat, is_main=is_writer)


def own_optimizer_state(optimizer: Optimizer, state: State) -> State:
    """Return a state without the entries of parameters that other stages hold."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {index: entry for index, entry in state["state"].items() if not parameters[index].is_meta}
    return {**state, "state": own}


def whole_tensors(pipeline: Pipeline, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the model's state, whole, one at a time and on every process. Collective."""
    shapes = pipeline.module.state_dict()
    for name, value in whole_state(pipeline, _whole):
        like = shapes[name]
        whole = torch.empty(like.shape, dtype=like.dtype, device=device) if value is None else value.to(device)
        dist.broadcast(whole.contiguous(), src=0)
        yield name, whole


def whole_model(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """Return the model's state on the first stage; empty elsewhere. Collective."""
    found = dict(whole_state(pipeline, _whole))
    return {name: value.detach().cpu() for name, value in found.items() if value is not None}


def clip_grad_norm(pipeline: Pipeline, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale the gradients of all stages by one norm, which is returned. Collective."""
    norm = grad_norm(pipeline, norm_type)
    grads = [parameter.grad for _, parameter in pipeline.own_parameters() if parameter.grad is not None]
    scale_down(grads, norm, max_norm)
    return norm


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
