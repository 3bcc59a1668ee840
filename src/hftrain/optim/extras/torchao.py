"""AdamW with averages in 8 or 4 bits, by torchao."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, load, read_options


class PlainState(Optimizer):
    """A mix-in for torchao's classes that keeps learning rates as numbers and the state dict in plain tensors."""

    quantized: Any = None
    """torchao's tensor class of the averages."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group whose rate is a number: schedules, logs and checkpoints would share torchao's tensor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["lr"] = float(group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters, with rates as tensors: the compiled update would be recompiled for each new number."""
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
        try:
            return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with quantized tensors split into their parts."""
        packed = super().state_dict()
        state = {
            key: {name: self._flatten(part) for name, part in value.items()} for key, value in packed["state"].items()
        }
        return {**packed, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        state = {
            key: {name: self._unflatten(part) for name, part in value.items()}
            for key, value in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})

    def _flatten(self, part: Any) -> Any:
        if not isinstance(part, self.quantized):
            return part
        names, attributes = part.__tensor_flatten__()
        tensors = {name: getattr(part, name) for name in names}
        # The dtype comes last and is the parameter's.
        return {"tensors": tensors, "attributes": [tuple(a) if isinstance(a, tuple) else a for a in attributes[:-1]]}

    def _unflatten(self, part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return self.quantized.__tensor_unflatten__(part["tensors"], [*part["attributes"], torch.float32])


def adamw(config: OptimizerConfig, model: nn.Module | None, *, bits: int) -> OptimizerClass:
    """Return torchao's AdamW; tensors of fewer than 4096 values keep averages in full precision.

    Source: Dettmers et al., 2022, arXiv 2110.02861 (8 bits); Li et al., 2023, arXiv 2309.01507 (4 bits).
    """
    cls = load(f"torchao.optim:AdamW{bits}bit", "torchao>=0.11", config, extra="torchao")
    tensor = load(f"torchao.optim.subclass_{bits}bit:OptimState{bits}bit", "torchao>=0.11", config, extra="torchao")
    options = {"block_size": 256, **read_options(config, {"block_size": int, "bf16_stochastic_round": bool})}
    subclass = type(cls.__name__, (PlainState, cls), {"__module__": cls.__module__, "quantized": tensor})
    return subclass, {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps, **options}
