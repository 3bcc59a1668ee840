"""The states of a model that runs as a pipeline: each stage has, saves and loads what it holds."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hftrain.core.parameters import local_part
from hftrain.core.types import Shard
from hftrain.strategies.fsdp.states import norm_of, pieces, scale_down, split_optimizer
from hftrain.strategies.lockstep import empty
from hftrain.strategies.mesh.pipeline import Pipeline
from hftrain.strategies.ranks import MemberRanks

State = dict[str, Any]


def optimizer_pieces(pipeline: Pipeline, optimizer: Optimizer, *, is_writer: bool) -> tuple[State, dict[str, Shard]]:
    """Return an optimizer's groups with what is not a tensor, and this process's part of its state. Collective.

    Args:
        optimizer: Its optimizer, over the parameters of all stages in their order.
        is_writer: Whether this process writes what all ranks of its stage hold whole, such as the number of steps.
    """
    state = optimizer.state_dict()
    own_ids = {id(parameter) for _, parameter in pipeline.own_parameters(once=True)}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries = {index: entry for index, entry in state["state"].items() if id(parameters[index]) in own_ids}
    plain_state, tensors = split_optimizer({**state, "state": entries}, torch.is_tensor)
    device = next(pipeline.own_parameters())[1].device
    stages = MemberRanks(pipeline.group, device).gather_object(plain_state["state"])
    # Keys are text after JSON.
    plain_of_all_stages = {int(index): entry for stage in stages for index, entry in stage.items() if entry}
    return {**state, "state": plain_of_all_stages}, pieces(tensors, is_main=is_writer)


def whole_tensors(pipeline: Pipeline, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the model's state, whole, one at a time and on every process. Collective."""
    for name, tensor in pipeline.module.state_dict().items():
        stage = pipeline.plan.owners.get(name, (0,))[0]
        whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        whole = whole.contiguous() if stage == pipeline.stage.index else empty(whole, device)
        dist.broadcast(whole, group=pipeline.group, group_src=stage)
        yield name, whole


def clip_grad_norm(
    pipeline: Pipeline, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale the gradients of parameters of all stages by their norm, which is returned; tied copies count once.

    Collective.
    """
    among = set(map(id, parameters))
    unique = [parameter for _, parameter in pipeline.own_parameters(once=True) if id(parameter) in among]
    grads = [parameter.grad for parameter in unique if parameter.grad is not None]
    # Stages must agree on the dtype, also one that trains nothing; each knows all parameters.
    dtypes = {parameter.dtype for parameter in pipeline.module.parameters() if parameter.requires_grad}
    dtype = functools.reduce(torch.promote_types, dtypes)
    device = next(pipeline.own_parameters())[1].device
    stage_norm = norm_of(grads, norm_type).to(dtype) if grads else torch.zeros((), dtype=dtype, device=device)
    norms = [torch.empty_like(stage_norm) for _ in range(pipeline.plan.num_stages)]
    dist.all_gather(norms, stage_norm, group=pipeline.group)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return scale_down([parameter.grad for parameter in parameters if parameter.grad is not None], norm, max_norm)


class StagesScaler(GradScaler):
    """Scale the loss of a pipeline; all processes skip an update if the gradients of one stage overflow."""

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale. Collective."""
        parameters = [each for group in optimizer.param_groups for each in group["params"] if not each.is_meta]
        grads = [each.grad for each in parameters if each.grad is not None]
        # A stage that trains nothing has no gradient, and the scaler needs one to hear of an overflow.
        borrower, witness = (None, grads[0]) if grads else (parameters[0], torch.zeros_like(parameters[0]))
        largest = [torch.linalg.vector_norm(local_part(grad), torch.inf) for grad in grads]
        overflows = ~torch.stack(largest or [local_part(witness).new_zeros(())]).isfinite().all()
        flag = overflows.float()
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        local_part(witness).add_(torch.where(flag > 0, torch.inf, 0.0))
        if borrower is not None:
            borrower.grad = witness
        super().unscale_(optimizer)
        if borrower is not None:
            borrower.grad = None
