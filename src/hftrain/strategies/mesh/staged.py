"""The states of a model that runs as a pipeline: each stage has, saves and loads what it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hftrain.core.types import Shard
from hftrain.strategies.collectives import gather_object
from hftrain.strategies.fsdp.states import local_part, pieces, scale_down
from hftrain.strategies.mesh.pipeline import Pipeline, grad_norm, whole_state

State = dict[str, Any]


def model_pieces(pipeline: Pipeline, state: Mapping[str, Any], *, is_main: bool) -> dict[str, Shard]:
    """Return this process's part of a model's state; of tensors with copies in several stages, the first writes."""
    stage, owners = pipeline.stage.index, pipeline.plan.owners
    own = {name: value for name, value in state.items() if owners.get(name, (0,))[0] == stage}
    return pieces(own, is_main=is_main)


def optimizer_pieces(pipeline: Pipeline, optimizer: Optimizer, *, is_writer: bool) -> tuple[State, dict[str, Shard]]:
    """Return an optimizer's groups with what is not a tensor, and this process's part of its state. Collective.

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
    plain = {
        index: {key: value for key, value in entry.items() if not isinstance(value, torch.Tensor)}
        for index, entry in state["state"].items()
        if id(parameters[index]) in own
    }
    stages = gather_object(plain, device=next(pipeline.own_parameters())[1].device, group=pipeline.group)
    # Keys are text after JSON.
    whole = {int(index): entry for each in stages for index, entry in each.items() if entry}
    return {**state, "state": whole}, pieces(flat, is_main=is_writer)


def object_pieces(pipeline: Pipeline, found: Mapping[str, Shard]) -> dict[str, Shard]:
    """Return the pieces of objects' states, named by paths, that this stage writes; of tied copies, the first does."""
    stage, owners = pipeline.stage.index, pipeline.plan.owners
    return {path: each for path, each in found.items() if owners.get(json.loads(path)[-1], (stage,))[0] == stage}


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


def clip_grad_norm(
    pipeline: Pipeline, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale the gradients of parameters of all stages by their norm, which is returned. Collective."""
    norm = grad_norm(pipeline, norm_type, parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    scale_down(grads, norm, max_norm)
    return norm


class StagesScaler(GradScaler):
    """Scale the loss of a pipeline; all processes skip an update if the gradients of one stage overflow."""

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale. Collective."""
        held = [each for group in optimizer.param_groups for each in group["params"] if not each.is_meta]
        grads = [each.grad for each in held if each.grad is not None]
        # A stage that trains nothing has no gradient, and the scaler needs one to hear of an overflow.
        borrowed, witness = (None, grads[0]) if grads else (held[0], torch.zeros_like(held[0]))
        largest = [torch.linalg.vector_norm(local_part(grad), torch.inf) for grad in grads]
        overflows = ~torch.stack(largest or [local_part(witness).new_zeros(())]).isfinite().all()
        spoil = overflows.float()
        dist.all_reduce(spoil, dist.ReduceOp.MAX)
        local_part(witness).add_(torch.where(spoil > 0, torch.inf, 0.0))
        if borrowed is not None:
            borrowed.grad = witness
        super().unscale_(optimizer)
        if borrowed is not None:
            borrowed.grad = None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
