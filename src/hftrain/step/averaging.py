"""Average gradients that no wrapper of the model averages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hftrain.strategies.base import Strategy


@torch.no_grad()
def average_gradients(parameters: Sequence[torch.Tensor], strategy: Strategy) -> None:
    """Average the gradients over all processes. Collective; mutates them.

    A process whose batch did not use a parameter has no gradient for it. If no process used it, it keeps none.
    """
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        chosen = [parameter for parameter in parameters if parameter.dtype == dtype]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
        flags = parts[0].new_tensor([float(p.grad is not None) for p in chosen])
        sums = strategy.reduce(torch.cat([flags, *(part.reshape(-1) for part in parts)]), "mean")
        means = torch.split(sums[len(flags) :], [p.numel() for p in chosen])
        for number, (parameter, mean) in enumerate(zip(chosen, means, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(mean.view_as(parameter))
            elif sums[number] > 0:
                parameter.grad = mean.view_as(parameter).to(parameter.device, copy=True)
