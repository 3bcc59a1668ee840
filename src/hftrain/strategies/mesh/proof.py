"""What a plan takes for granted of gradients, checked in the first update."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from hftrain.core.errors import StrategyError, listed


class Proof:
    """Norms on this rank, of gradients and of inputs, up to the first update: one for each module, of its last call.

    Attributes:
        inputs: Of inputs that every tensor rank must hold, the same.
        same: Of outputs whose gradient every tensor rank must get, the same.
        parts: Of parameters of whose gradient every tensor rank must get a part.
    """

    def __init__(self) -> None:
        self.inputs: dict[nn.Module, torch.Tensor] = {}
        self.same: dict[nn.Module, torch.Tensor] = {}
        self.parts: dict[nn.Module, torch.Tensor] = {}
        self.is_open = True

    def note_input(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return a module's input; note its norm."""
        if self.is_open and x.requires_grad and not torch.compiler.is_compiling():
            self.inputs[module] = torch.linalg.vector_norm(x.detach(), dtype=torch.float64)
        return x

    def note(self, norms: dict[nn.Module, torch.Tensor], module: nn.Module, x: torch.Tensor) -> None:
        """Note the norm of a tensor's gradient in the backward pass."""
        if self.is_open and x.requires_grad and not torch.compiler.is_compiling():
            norms[module] = x.new_zeros((), dtype=torch.float64)  # now, for one order on all ranks
            x.register_hook(lambda grad: norms.update({module: grad.detach().double().norm()}))  # type: ignore[no-untyped-call]

    def check_in_first_update(
        self, model: Callable[[], nn.Module], optimizer: Optimizer, group: dist.ProcessGroup
    ) -> None:
        """Let the optimizer's first step raise if the tensor ranks' gradients are not what the plan takes them for."""
        for norms in (self.inputs, self.same, self.parts):
            norms.clear()  # of a model that was placed before, as in a rehearsal
        self.is_open = True

        def check(*_: object) -> None:
            handle.remove()
            self.is_open = False
            names = {module: name for name, module in model().named_modules()}
            replicas = {f"inputs of {names[module]}": norm for module, norm in self.inputs.items()}
            for name, parameter in model().named_parameters():
                grad = parameter.grad
                if isinstance(grad, DTensor) and isinstance(grad.placements[-1], Replicate):
                    replicas[f"gradients of {name}"] = grad.to_local().detach().double().norm()
            replicas.update({f"gradients of the output of {names[module]}": norm for module, norm in self.same.items()})
            unequal = [name for name, (low, high) in _ranges(replicas, group) if high - low > 1e-3 * abs(high)]
            if unequal:
                raise StrategyError(
                    f"The tensor ranks have different {listed(unequal, most=3)}, which each holds whole:",
                    "the plan leaves out where their computations part or meet (transformers' before 5.3 do).",
                    "Give these modules the style 'replicated_with_grad_allreduce', or split what surrounds them "
                    "column-wise first and row-wise last.",
                )
            parts = {names[module]: norm for module, norm in self.parts.items()}
            equal = [name for name, (low, high) in _ranges(parts, group) if high > 0 and high - low < 1e-9 * high]
            if equal:
                raise StrategyError(
                    f"The tensor ranks have the same gradients of {listed(equal, most=3)}, which would be added up:",
                    "the plan gives 'replicated_with_grad_allreduce' to a module that computes the same on every rank.",
                    "Leave the module out of the plan, or give it the style 'replicated'.",
                )

        handle = optimizer.register_step_pre_hook(check)


def _ranges(norms: dict[str, torch.Tensor], group: dist.ProcessGroup) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield the smallest and the largest of all ranks' norms, by name. Collective."""
    if not norms:
        return
    values = torch.stack([*norms.values()]).nan_to_num(nan=-1.0, posinf=-2.0)  # all ranks have those, or differ
    bounds = torch.stack([values, -values])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    yield from zip(norms, zip((-bounds[1]).tolist(), bounds[0].tolist(), strict=True), strict=True)
