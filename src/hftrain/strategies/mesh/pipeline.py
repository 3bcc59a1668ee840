"""Pipeline parallelism: a model whose layers run on several ranks, behind a module with the model's signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hftrain.core.errors import ConfigError, suggest
from hftrain.strategies.fsdp.states import norm_of
from hftrain.strategies.mesh.cutting import Cut, divide, release, tie
from hftrain.strategies.mesh.links import Links, empty
from hftrain.strategies.mesh.schedules import COLLECTED, Run, Settings, sharded
from hftrain.strategies.mesh.stages import Stage

SCHEDULES = ("gpipe", "1f1b")


def cut(model: nn.Module, group: dist.ProcessGroup, **options: Any) -> Pipeline:
    """Cut a model into as many stages as a group has ranks, keep this rank's, and return the pipeline.

    Parameters of other stages move to the meta device. Shard the returned pipeline's `own_modules` afterwards, and call
    its `tie`.

    Args:
        model: The whole model, with the same weights on every rank; changed in place.
        group: The ranks of the stages, in order.
        **options: See `Pipeline`.

    Raises:
        ConfigError: See `divide` and `Pipeline`.
    """
    plan = divide(model, dist.get_world_size(group))
    pipeline = Pipeline(model, plan, group, **options)
    release(model, plan, pipeline.stage.index)
    return pipeline


class Pipeline(nn.Module):
    """A model whose stages run on the ranks of a group; called like the model, with the same whole batch on each.

    The batch is cut into micro-batches, and the outputs are those of the whole batch on every rank. If gradients are
    enabled and the model returns a mapping with a loss (as transformers' models do), only the loss is returned.

    - ``"gpipe"`` runs the forwards when it is called, the model's head and loss once on the whole batch, and the
      backward passes in backward. It is exact for every loss, inside the model or outside.
    - ``"1f1b"`` runs a micro-batch's backward pass as soon as it can, so that a stage keeps the activations of at
      most as many micro-batches as there are stages. All backward passes happen when the pipeline is called, so
      the model must return the loss itself, as a sum divided by ``num_items_in_batch``.

    Args:
        module: The model.
        plan: How it is cut.
        group: The ranks of the stages, in order.
        schedule: ``"gpipe"`` or ``"1f1b"``.
        num_micro_batches: How many micro-batches a batch is cut into; default: one a stage.

    Raises:
        ConfigError: No schedule has that name, or it does not fit the model, or the number is not positive.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Cut,
        group: dist.ProcessGroup,
        *,
        schedule: str = "gpipe",
        num_micro_batches: int | None = None,
    ) -> None:
        super().__init__()
        self.module, self.plan, self.group, self.schedule = module, plan, group, schedule
        self.num_micro_batches = plan.num_stages if num_micro_batches is None else num_micro_batches
        self.stage, self.links = Stage(module, plan, dist.get_rank(group)), Links(group)
        self._takes = inspect.signature(module.forward).parameters
        self._check()
        labels = self._takes.get("labels")
        self._settings = Settings(
            self.stage,
            self.links,
            interleaves=schedule == "1f1b",
            num_micro_batches=self.num_micro_batches,
            counts_next=self._is_causal(),
            skips_labels=labels is not None and labels.default is None,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs for a whole batch. Collective.

        Raises:
            StrategyError: The model cannot run as a pipeline.
            TaskError: The batch cannot be cut into micro-batches.
        """
        if "use_cache" in self._takes:
            kwargs.setdefault("use_cache", False)
        run = Run(self._settings, args, kwargs)
        if not torch.is_grad_enabled():
            return run.outputs(run.forward())
        for module in sharded(self.module):
            module.reshard()
        own = [(name, parameter) for name, parameter in self.own_parameters() if parameter.requires_grad]
        parameters = [parameter for _, parameter in own]
        run.owners = [self.plan.owners[name] for name, _ in own]
        # Ranks without trainable parameters take part in the backward pass, too.
        anchor = torch.zeros((), requires_grad=True)
        return run.outputs(_Function.apply(run, parameters, anchor, *parameters))  # type: ignore[no-untyped-call]

    def own_modules(self) -> list[nn.Module]:
        """Return this stage's layers and parts, in order; they hold all of its parameters."""
        return [self.module.get_submodule(name) for name in self.plan.own(self.stage.index)]

    def tie(self) -> None:
        """Tie weights again after `own_modules` were sharded, so that names are those of one process."""
        tie(self.module, self.plan, self.stage.index)

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
        asked = f"Cannot train {type(self.module).__name__} with schedule={self.schedule!r}."
        if self.schedule not in SCHEDULES:
            raise ConfigError(asked, "No schedule has that name.", suggest(self.schedule, SCHEDULES))
        if self.num_micro_batches < 1:
            raise ConfigError(asked, f"num_micro_batches={self.num_micro_batches} is not positive.", "Use 1 or more.")
        if self.schedule == "1f1b" and not (self._is_causal() or "num_items_in_batch" in self._takes):
            reason = "Its forward takes no num_items_in_batch, by which the losses of micro-batches are divided."
            raise ConfigError(asked, reason, "Use schedule='gpipe', which suits every loss.")
        collected = [name for name in COLLECTED if getattr(getattr(self.module, "config", None), name, False)]
        if collected:
            reason = f"Its config has {collected[0]}=True, and a stage has only some of the layers."
            raise ConfigError(asked, reason, f"Set config.{collected[0]} = False, or use pp_size=1.")

    def _is_causal(self) -> bool:
        return getattr(getattr(self.module, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


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


def grad_norm(
    pipeline: Pipeline, norm_type: float = 2.0, parameters: Iterable[torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the norm of the gradients of all stages, of these parameters only; tied copies count once. Collective."""
    among = set(map(id, pipeline.module.parameters() if parameters is None else parameters))
    once = [parameter for _, parameter in pipeline.own_parameters(once=True) if id(parameter) in among]
    grads = [parameter.grad for parameter in once if parameter.grad is not None]
    # Stages must agree on the dtype, also one that trains nothing; each knows all parameters.
    trained = {parameter.dtype for parameter in pipeline.module.parameters() if parameter.requires_grad}
    dtype = functools.reduce(torch.promote_types, trained)
    device = next(pipeline.own_parameters())[1].device
    own = norm_of(grads, norm_type).to(dtype) if grads else torch.zeros((), dtype=dtype, device=device)
    all_own = [torch.empty_like(own) for _ in range(pipeline.plan.num_stages)]
    dist.all_gather(all_own, own, group=pipeline.group)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(all_own), norm_type)
    return norm


def whole_state(
    pipeline: Pipeline, whole: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the model's state, one tensor at a time, on the first stage; None on the others. Collective.

    Args:
        pipeline: The pipeline.
        whole: Returns the whole of one of this stage's tensors (``DTensor.full_tensor``).
    """
    links = pipeline.links
    device = next((x.device for _, x in pipeline.own_parameters()), None)
    for name, tensor in pipeline.module.state_dict().items():
        owner, own = pipeline.plan.owners.get(name, (0,))[0], links.rank
        if owner == own:
            value = whole(tensor)
            if own > 0:
                links.exchange([(value, -own)], [])
        elif own == 0:
            value = links.exchange([], [(empty(tensor, device), owner)])[0]
        yield name, value if own == 0 else None
