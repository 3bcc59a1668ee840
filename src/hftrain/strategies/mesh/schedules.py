"""How one batch goes through a pipeline: micro-batches, what stages send each other, and the order of it all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hftrain.core.errors import StrategyError, TaskError, listed
from hftrain.core.log import warn_once
from hftrain.core.parameters import local_part
from hftrain.core.tree import batch_size_of, map_tensors, tensors_of
from hftrain.strategies.lockstep import described, empty, restored
from hftrain.strategies.mesh.stages import Stage

# What would be collected from all layers, of which a stage has only some.
COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


class Run:
    """One batch's way through the pipeline, as this stage sees it.

    Args:
        num_micro_batches: How many micro-batches the batch is cut into, at most.
        interleaves: Whether backward passes run as soon as they can.
    """

    def __init__(
        self, stage: Stage, args: tuple[Any, ...], kwargs: dict[str, Any], num_micro_batches: int, *, interleaves: bool
    ) -> None:
        self.stage, self.links, self.args, self.kwargs = stage, stage.links, args, kwargs
        self.interleaves = interleaves
        inputs = tensors_of((args, kwargs))
        if not inputs:
            problem = f"Cannot run {type(stage.model).__name__} as a pipeline: it is called without a tensor."
            reason = "The batch is cut into micro-batches along the first dimension of its tensors."
            raise TaskError(problem, reason, "Pass the inputs to the model as tensors, or use pp_size=1.")
        self.device = stage.device = inputs[0].device
        self.micro_batches = self._cut(num_micro_batches)
        self.received: list[torch.Tensor | None] = []
        self.sent: list[torch.Tensor] = []
        self.results: list[torch.Tensor] = []
        # Whether each output is differentiable.
        self.leaves: list[bool] = []
        # With interleaved backward passes: the gradients, and the outputs of the last micro-batch.
        self.kept: list[torch.Tensor | None] | None = None
        self.last: Any = None
        # The stages that hold each of this stage's trainable parameters.
        self.owners: Sequence[Sequence[int]] = ()
        self.form: Any = None
        self.is_training = torch.is_grad_enabled()
        self.key = self._key()
        stage.checks = self.key not in stage.forms

    def outputs(self, values: Sequence[torch.Tensor]) -> Any:
        """Return the model's outputs from their tensors."""
        each = iter(values)
        return map_tensors(self.form, lambda _: next(each))

    def forward(self, parameters: Sequence[nn.Parameter] = ()) -> list[torch.Tensor]:
        """Run all micro-batches and return the tensors of the outputs on every rank."""
        if self.is_training and self.interleaves:
            return self._share(self._interleaved(parameters))
        for index in range(len(self.micro_batches)):
            hidden = self._forward(index)
            if not self.stage.is_last:
                self._exchange(hidden, None)
        outputs = None
        if self.stage.is_last:
            hidden = torch.cat([value.detach() for value in self.sent[: self.num_real]])
            self.whole = hidden.requires_grad_(self.is_training)
            outputs = self.stage.finish(self.args, self.kwargs, self.whole)
        return self._share(outputs)

    def backward(
        self, parameters: Sequence[nn.Parameter], grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Run the backward passes of all micro-batches and return the gradients of this stage's parameters."""
        if self.kept is not None:
            factor = torch.zeros((), device=self.device) if grads[0] is None else grads[0]
            _check_alike(parameters, factor)
            return [None if grad is None else grad * factor for grad in self.kept]
        with _without_grads(parameters) as grads_out:
            parts: Sequence[torch.Tensor] = ()
            if self.stage.is_last:
                self._sync(True)
                pairs = [(x, grad) for x, grad in zip(self.results, grads, strict=True) if grad is not None]
                torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
                loss_grad = torch.zeros_like(self.whole) if self.whole.grad is None else self.whole.grad
                parts = torch.split(loss_grad, [value.shape[0] for value in self.sent[: self.num_real]])
                parts = [*parts, *map(torch.zeros_like, self.sent[self.num_real :])]
            for index in range(len(self.micro_batches)):
                self._backward(index, parts[index] if parts else self._exchange(None, index))
            grads_out.extend(self._sum_tied(parameters))
        return grads_out

    # -- implementation ------------------------------------------------------------------------------------------

    def _forward(self, index: int) -> torch.Tensor:
        """Receive the hidden states of a micro-batch and return what this stage makes of them."""
        hidden_in = None
        if not self.stage.is_first:
            hidden_in = self._receive(index).requires_grad_(self.is_training)
        self.received.append(hidden_in)
        args, kwargs = self.micro_batches[index]
        # Only the last stage computes a loss, from all micro-batches.
        labels = self.stage.takes.get("labels")
        is_optional = labels is not None and labels.default is None
        kwargs = {name: value for name, value in kwargs.items() if name != "labels" or not is_optional}
        hidden = self.stage.run(args, kwargs, hidden_in)
        self.sent.append(hidden)
        shape = (self.rows[index], *self.sent[0].shape[1:])
        if len(self.rows) > 1 and hidden.shape != shape:
            raise StrategyError(
                f"Cannot run {type(self.stage.model).__name__} as a pipeline of several micro-batches.",
                f"Its layers return the shape {list(hidden.shape)} for {self.rows[index]} samples.",
                "Let the layers keep samples first, or use num_micro_batches=1.",
            )
        return hidden

    def _backward(self, index: int, grad: torch.Tensor | None) -> None:
        """Run a micro-batch's backward pass through this stage and send the gradient to the stage before."""
        self._sync(index == len(self.micro_batches) - 1)
        hidden, hidden_in = self.sent[index], self.received[index]
        if hidden.requires_grad:
            with torch.autocast(hidden.device.type, enabled=False):
                torch.autograd.backward(hidden, grad)
        if hidden_in is not None:
            self.links.exchange([(torch.zeros_like(hidden_in) if hidden_in.grad is None else hidden_in.grad, -1)], [])
        self.received[index], self.sent[index] = None, hidden.detach()

    def _interleaved(self, parameters: Sequence[nn.Parameter]) -> Any:
        """Run each micro-batch's backward pass as soon as later stages have; return the outputs with the loss."""
        number, stage = len(self.micro_batches), self.stage
        lead = min(self.links.size - 1 - stage.index, number)
        with _without_grads(parameters) as self.kept:
            for index in range(number):
                value = self._loss(index) if stage.is_last else self._forward(index)
                if index < lead:
                    self._exchange(value, None)
                else:
                    oldest = index - lead
                    zero_grad = torch.zeros_like(value) if index >= self.num_real else None
                    self._backward(oldest, zero_grad if stage.is_last else self._exchange(value, oldest))
            for index in range(number - lead, number):
                self._backward(index, self._exchange(None, index))
            self.kept.extend(self._sum_tied(parameters))
        if not stage.is_last:
            return None
        total = torch.stack(self.sent[: self.num_real]).sum().requires_grad_()
        if isinstance(self.last, Mapping):
            return _only_loss(self.last, total)
        return total if isinstance(self.last, torch.Tensor) else (total, *[None] * (len(self.last) - 1))

    def _loss(self, index: int) -> torch.Tensor:
        """Return a micro-batch's share of the loss, on the last stage."""
        args, kwargs = self.micro_batches[index]
        hidden_in = self._receive(index).requires_grad_()
        self.received.append(hidden_in)
        kwargs = {**kwargs, "num_items_in_batch": self._count_items()}
        self.last = self.stage.finish(args, kwargs, hidden_in, self.stage.own)
        is_loss = isinstance(self.last, torch.Tensor)
        loss: torch.Tensor = self.last if is_loss else self.last["loss" if isinstance(self.last, Mapping) else 0]
        self.last = map_tensors(self.last, torch.Tensor.detach)
        self.sent.append(loss)
        return loss

    def _count_items(self) -> Any:
        """Return the number of items in the whole batch, by which every micro-batch's loss is divided."""
        count = self.kwargs.get("num_items_in_batch")
        if count is not None:
            return count
        labels, shift = self.kwargs.get("shift_labels"), 0
        if labels is None:
            labels, shift = self.kwargs.get("labels"), 1
        if labels is None or not self.stage.is_causal:
            raise TaskError(
                "Cannot train with schedule='1f1b'.",
                "The number of items in the batch is unknown, by which the losses of micro-batches are divided.",
                "Pass num_items_in_batch (and labels) to the model, or use schedule='gpipe'.",
            )
        return (labels[..., shift:] != -100).sum()

    def _exchange(self, hidden: torch.Tensor | None, index: int | None) -> Any:
        """Send hidden states to the next stage and receive the gradient of another micro-batch's, if named."""
        sends = [] if hidden is None else [(hidden.detach(), +1)]
        if hidden is not None and self.stage.checks and len(self.sent) == 1:
            self.links.tell(hidden)
        receives = [] if index is None else [(empty(self.sent[index]), +1)]
        return next(iter(self.links.exchange(sends, receives)), None)

    def _receive(self, index: int) -> torch.Tensor:
        key = (self.key, "received")
        if self.stage.checks and index == 0:
            self.stage.forms[key] = self.links.hear(self.device)
        template = self.stage.forms[key]
        shape = (self.rows[index], *template.shape[1:]) if len(self.rows) > 1 else template.shape
        buffer = torch.empty(shape, dtype=template.dtype, device=self.device)
        return self.links.exchange([], [(buffer, -1)])[0]

    def _share(self, outputs: Any) -> list[torch.Tensor]:
        """Give every rank the last stage's outputs, detached; keep the outputs themselves."""
        if self.stage.is_last:
            if self.is_training and isinstance(outputs, Mapping) and outputs.get("loss") is not None:
                outputs = _only_loss(outputs, outputs["loss"])
            outputs = self._without_hollow(outputs)
            self.results = tensors_of(outputs)
        if self.stage.checks:
            form = self.links.broadcast_object(described(outputs), self.device)
            self.stage.forms[self.key] = restored(form, self.stage.kind)
        self.form = self.stage.forms[self.key]
        templates = tensors_of(self.form)
        self.leaves = [each.requires_grad for each in templates]
        if self.stage.is_last:
            shapes = [x.shape for x in self.results]
            if shapes != [x.shape for x in templates]:
                raise StrategyError(
                    "Cannot share the outputs of a pipeline.",
                    f"Batches of the same form gave outputs of the shapes {shapes} and {[x.shape for x in templates]}.",
                    "Let the shapes of a model's outputs depend on the shapes of its inputs only.",
                )
        is_last = self.stage.is_last
        values = [x.detach() for x in self.results] if is_last else [empty(x, self.device) for x in templates]
        return [self.links.broadcast(value) for value in values]

    def _without_hollow(self, outputs: Any) -> Any:
        """Leave out what parts of the first stage compute, which is NaN in the last one while other outputs are not."""
        if not isinstance(outputs, Mapping):
            return outputs
        key = (self.key, "hollow")
        if self.stage.checks:
            # A loss may be NaN for other reasons.
            tensors = {name: x for name, x in outputs.items() if isinstance(x, torch.Tensor) and x.dim()}
            hollow = [name for name, x in tensors.items() if x.is_floating_point() and bool(x.isnan().all())]
            self.stage.forms[key] = hollow = hollow if len(hollow) < len(tensors) else []
            if hollow:
                warn_once(
                    f"Outputs of {type(self.stage.model).__name__} come from the first stage of the pipeline, and are "
                    f"left out: {listed(hollow)}. Use pp_size=1 if you need them."
                )
        rest: Any = {name: x for name, x in outputs.items() if name not in self.stage.forms[key]}
        return outputs if len(rest) == len(outputs) else self.stage.kind(rest)

    def _sum_tied(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
        """Return the gradients; those of tied weights are the sums over the stages that have a copy."""
        index = self.stage.index
        for parameter, owners in zip(parameters, self.owners, strict=True):
            if len(owners) > 1:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grad = local_part(parameter.grad)
                steps = [stage - index for stage in owners if stage != index]
                copies = self.links.exchange([(grad, step) for step in steps], [(empty(grad), step) for step in steps])
                copies.insert(owners.index(index), grad.clone())
                # In the order of the stages, so that the copies stay equal to the bit.
                grad.copy_(sum(copies[1:], copies[0]))
        return [parameter.grad for parameter in parameters]

    def _sync(self, is_last: bool) -> None:
        """Let sharded modules reduce their gradients in this backward pass, or keep them."""
        for module in sharded(self.stage.model):
            module.set_requires_gradient_sync(is_last, recurse=False)
            if id(module) == id(self.stage.model):
                # Only the last stage has outputs of the whole model, by which FSDP gathers its parameters again.
                module.set_reshard_after_backward(is_last, recurse=False)

    def _cut(self, number: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Cut the batch into micro-batches, whose sizes differ by one at most.

        With fewer samples than micro-batches, the last ones repeat a sample and count for nothing: data ranks gather
        parameters together in each, and their batches may differ in size.
        """
        flags = [name for name in COLLECTED if self.kwargs.get(name)]
        if flags:
            reason = f"{flags[0]} asks for tensors of all layers, and a stage has only some of them."
            raise TaskError("Cannot run this batch through a pipeline.", reason, "Leave it out, or use pp_size=1.")
        size = batch_size_of({**dict(enumerate(self.args)), **self.kwargs}) or 1
        self.num_real = min(number, size)
        if number == 1 or size == 1:
            self.rows = [size] * number
            return [(self.args, self.kwargs)] * number
        self.rows = [max(size // number + (index < size % number), 1) for index in range(number)]

        def part(index: int, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() and tensor.shape[0] == size:
                return tensor.tensor_split(self.num_real)[min(index, size - 1)]
            if tensor.dim() and tensor.shape[0] != 1:
                raise TaskError(
                    "Cannot cut this batch into micro-batches.",
                    f"Its size is {size}, and a tensor has the shape {list(tensor.shape)}.",
                    "Put the samples first in every tensor, or use num_micro_batches=1 with a batch of one sample.",
                )
            return tensor

        return [map_tensors((self.args, self.kwargs), partial(part, index)) for index in range(number)]

    def _key(self) -> Any:
        """Return what the shapes of activations and outputs depend on: all ranks find the same."""
        forms: list[Any] = []
        named = {name: value for name, value in self.kwargs.items() if name != "num_items_in_batch"}
        plain = map_tensors((self.args, named), lambda x: forms.append((tuple(x.shape), x.dtype)))
        modes = self.is_training, self.stage.model.training, torch.is_autocast_enabled(self.device.type)
        return str((plain, forms, *modes))


@contextmanager
def _without_grads(parameters: Sequence[nn.Parameter]) -> Iterator[list[torch.Tensor | None]]:
    """Start with parameters without gradients, and put those that they had back at the end."""
    old_grads = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield []
    finally:
        for parameter, grad in zip(parameters, old_grads, strict=True):
            parameter.grad = grad


def _check_alike(parameters: Sequence[nn.Parameter], factor: torch.Tensor) -> None:
    """Raise if ranks that share parameters weigh their losses differently: gradients are averaged already."""
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    for mesh in meshes:
        for dim in range(mesh.ndim):
            bounds = torch.stack([factor, -factor]).nan_to_num()
            dist.all_reduce(bounds, dist.ReduceOp.MAX, mesh.get_group(dim))
            if bounds[0] != -bounds[1]:
                raise StrategyError(
                    "Cannot train with schedule='1f1b'.",
                    "Processes weigh their losses differently, and the gradients were averaged before.",
                    "Use a loss that is divided by num_items_in_batch, or schedule='gpipe'.",
                )


def sharded(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP2 shards."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _only_loss(outputs: Any, loss: torch.Tensor) -> Any:
    return type(outputs)({"loss": loss})
