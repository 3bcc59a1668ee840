"""What the ranks of a plan compute together, compared once with what one process computes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from hftrain.core.errors import StrategyError
from hftrain.core.log import get_logger
from hftrain.core.seed import preserved_rng
from hftrain.core.tree import is_cache, map_tensors, tensors_of
from hftrain.strategies.mesh.cutting import hollow
from hftrain.strategies.mesh.plans import Placing
from hftrain.strategies.mesh.proof import Proof


def prove_blocks(found: Sequence[Placing], proof: Proof) -> None:
    """Compare the first block of each kind with one process when it is first called in training.

    A block is the smallest module with a part that opens and one that closes; its inputs and outputs are whole. Its
    weights are gathered for the comparison, which computes it twice more. Call it before the modules are placed.
    """
    modules = {placing.name: placing.module for placing in found}
    opening = [placing.name for placing in found if placing.opens]
    kinds = set()
    for name in (placing.name for placing in found if placing.closes):
        while name and not any(each.startswith(f"{name}.") for each in opening):
            name = name.rpartition(".")[0]
        if (kind := re.sub(r"\.\d+", ".*", name)) not in kinds:
            kinds.add(kind)
            try:
                replica = hollow(modules[name]).eval()
            except Exception as error:  # what it holds besides may not be copied
                _warn(name, error)
                continue
            _prove(name, modules[name], replica, proof)


def _prove(name: str, block: nn.Module, replica: nn.Module, proof: Proof) -> None:
    def check(block: nn.Module, args: Any, kwargs: dict[str, Any], _: Any) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        handle.remove()
        if not proof.is_open:
            return
        # The forward pass that was has filled a cache, which another one would fill again.
        args, kwargs = (_without_cache(args), {key: _without_cache(value) for key, value in kwargs.items()})
        try:
            outputs, targets = _run(block, replica, args, kwargs)
        except Exception as error:
            _warn(name, error)
            return
        for index, (output, target) in enumerate(zip(outputs, targets, strict=True)):
            if output.shape != target.shape:
                if index > 0:
                    continue  # a rank returns a part of the attention's weights
                verdict = f"have the shape {list(output.shape)}, not {list(target.shape)}"
            else:
                distance, size = (output.double() - target.double()).norm(), target.double().norm()
                if not distance > torch.finfo(target.dtype).eps ** 0.5 * size:
                    continue
                verdict = f"differ by {float(distance / size):.2g} of their norm"
            raise StrategyError(
                f"The tensor ranks do not compute what one process does in {name or 'all'} ({type(replica).__name__}):",
                f"its outputs {verdict}. Either the plan splits what belongs together, or the code counts what a rank "
                "has only a part of, as view(batch, -1, self.num_heads, head_dim) does.",
                "Correct the plan, write view(batch, length, -1, head_dim), or leave the module out of the plan.",
            )

    handle = block.register_forward_hook(check, with_kwargs=True)


@torch.no_grad()
def _run(block: nn.Module, replica: nn.Module, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs in evaluation mode: of the ranks, and of the whole block. Collective."""
    parameters = {name: parameter.detach() for name, parameter in block.named_parameters()}
    weights = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in parameters.items()}
    # The block may change its buffers and arguments in place, and its backward pass needs those it has read.
    clone = partial(map_tensors, function=methodcaller("clone"))
    weights |= clone(dict(block.named_buffers()))
    inputs, replica_inputs = (clone((args, kwargs)) for _ in range(2))
    attributes = {module: vars(module).copy() for module in block.modules()}
    kind = next(iter(weights.values())).device.type
    # Weights that autocast keeps from here would have no gradient.
    autocast = torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    )
    try:
        for module, values in attributes.items():
            vars(module).update(training=False, _buffers=clone(values["_buffers"]))
        with autocast, preserved_rng(), warnings.catch_warnings():
            # Parts of parameters that are moved without gradients, as in every evaluation.
            warnings.filterwarnings("ignore", "To construct DTensor")
            # Without the hooks of the block itself: it is in a forward pass already.
            results = block.forward(*inputs[0], **inputs[1]), functional_call(replica, weights, *replica_inputs)
    finally:
        for module, values in attributes.items():
            vars(module).update(values)
    outputs, targets = ([x for x in tensors_of(each) if x.is_floating_point()] for each in results)
    return outputs, targets


def _warn(name: str, error: Exception) -> None:
    get_logger(__name__).warning("Cannot compare %s with one process: %s", name or "the model", error)


def _without_cache(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_cache, value))
    return None if is_cache(value) else value
