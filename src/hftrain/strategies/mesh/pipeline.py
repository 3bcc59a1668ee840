"""Pipeline parallelism: a model whose layers run on several ranks, behind a module with its signature; its states."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError, check_known
from hftrain.core.parameters import local_part
from hftrain.core.types import Shard
from hftrain.strategies.fsdp.states import norm_of, pieces, scale_down, split_optimizer
from hftrain.strategies.lockstep import empty
from hftrain.strategies.mesh.cutting import divide, release
from hftrain.strategies.mesh.schedules import COLLECTED, Run, sharded
from hftrain.strategies.mesh.stages import Links, Stage
from hftrain.strategies.ranks import MemberRanks

SCHEDULES = ("gpipe", "1f1b")


class Pipeline(nn.Module):
    """A model whose stages run on the ranks of a group; called like the model, with the same whole batch on each.

    The model is changed in place: parameters of other stages move to the meta device.

    The batch is cut into micro-batches, and the outputs are those of the whole batch on every rank. If gradients are
    enabled and the model returns a mapping with a loss (as transformers' models do), only the loss is returned.

    - ``"gpipe"`` runs the forwards when it is called, the model's head and loss once on the whole batch, and the
      backward passes in backward. It is exact for every loss, inside the model or outside.
    - ``"1f1b"`` runs a micro-batch's backward pass as soon as it can, so that a stage keeps the activations of at
      most as many micro-batches as there are stages. All backward passes happen when the pipeline is called, so
      the model must return the loss itself, as a sum divided by ``num_items_in_batch``.

    Args:
        module: The whole model, with the same weights on every rank.
        group: The ranks of the stages, in order.
        schedule: ``"gpipe"`` or ``"1f1b"``.
        num_micro_batches: How many micro-batches a batch is cut into; default: one a stage.

    Raises:
        ConfigError: No schedule has that name, or it does not fit the model, or the number is not positive; see also
            `divide`.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        *,
        schedule: str = "gpipe",
        num_micro_batches: int | None = None,
    ) -> None:
        super().__init__()
        self.module, self.group, self.schedule = module, group, schedule
        self.plan, links = divide(module, dist.get_world_size(group)), Links(group)
        self.num_micro_batches = links.size if num_micro_batches is None else num_micro_batches
        self.stage = Stage(module, self.plan, links)
        self._check()
        release(module, self.plan, links.rank)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs for a whole batch. Collective.

        Raises:
            StrategyError: The model cannot run as a pipeline.
            TaskError: The batch cannot be cut into micro-batches.
        """
        if "use_cache" in self.stage.takes:
            kwargs.setdefault("use_cache", False)
        run = Run(self.stage, args, kwargs, self.num_micro_batches, interleaves=self.schedule == "1f1b")
        if not torch.is_grad_enabled():
            return run.outputs(run.forward())
        for module in sharded(self.module):
            module.reshard()
        named_parameters = [(name, parameter) for name, parameter in self.own_parameters() if parameter.requires_grad]
        parameters = [parameter for _, parameter in named_parameters]
        run.owners = [self.plan.owners[name] for name, _ in named_parameters]
        # Ranks without trainable parameters take part in the backward pass, too.
        anchor = torch.zeros((), requires_grad=True)
        return run.outputs(_Function.apply(run, parameters, anchor, *parameters))  # type: ignore[no-untyped-call]

    def own_parameters(self, *, once: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this stage's parameters with their names in the model.

        Args:
            once: Leave out parameters of which an earlier stage has a copy (tied weights).
        """
        for name, parameter in self.module.named_parameters():
            owners = self.plan.owners[name]
            if self.stage.index in (owners[:1] if once else owners):
                yield name, parameter

    # -- implementation ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        problem = f"Cannot train {type(self.module).__name__} with schedule={self.schedule!r}."
        check_known(self.schedule, SCHEDULES, problem, "No schedule has that name.")
        if self.num_micro_batches < 1:
            raise ConfigError(problem, f"num_micro_batches={self.num_micro_batches} is not positive.", "Use 1 or more.")
        if self.schedule == "1f1b" and not (self.stage.is_causal or "num_items_in_batch" in self.stage.takes):
            reason = "Its forward takes no num_items_in_batch, by which the losses of micro-batches are divided."
            raise ConfigError(problem, reason, "Use schedule='gpipe', which suits every loss.")
        names = [name for name in COLLECTED if getattr(getattr(self.module, "config", None), name, False)]
        if names:
            reason = f"Its config has {names[0]}=True, and a stage has only some of the layers."
            raise ConfigError(problem, reason, f"Set config.{names[0]} = False, or use pp_size=1.")


class _Function(torch.autograd.Function):
    """A pipeline's run as one step of autograd: from this stage's parameters to the outputs."""

    @staticmethod
    def forward(ctx: Any, run: Run, parameters: list[nn.Parameter], anchor: Any, *_: Any) -> Any:
        ctx.run, ctx.parameters = run, parameters
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            outputs = run.forward(parameters)
        ctx.mark_non_differentiable(*(value for value, form in zip(outputs, run.leaves, strict=True) if not form))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        run, ctx.run = ctx.run, None
        if run is None:
            raise RuntimeError("A pipeline's activations are freed: call backward() once for each forward.")
        return None, None, None, *run.backward(ctx.parameters, grads)


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
