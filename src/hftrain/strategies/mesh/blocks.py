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
                whole = hollow(modules[name]).eval()
            except Exception as error:  # what it holds besides may not be copied
                _warn(name, error)
                continue
            _prove(name, modules[name], whole, proof)


def _prove(name: str, block: nn.Module, whole: nn.Module, proof: Proof) -> None:
    def check(block: nn.Module, args: Any, kwargs: dict[str, Any], _: Any) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        handle.remove()
        if not proof.is_open:
            return
        # The forward pass that was has filled a cache, which another one would fill again.
        args, kwargs = (_without_cache(args), {key: _without_cache(value) for key, value in kwargs.items()})
        try:
            ours, theirs = _both(block, whole, args, kwargs)
        except Exception as error:
            _warn(name, error)
            return
        for place, (own, right) in enumerate(zip(ours, theirs, strict=True)):
            if own.shape != right.shape:
                if place > 0:
                    continue  # a rank returns a part of the attention's weights
                what = f"have the shape {list(own.shape)}, not {list(right.shape)}"
            else:
                distance, size = (own.double() - right.double()).norm(), right.double().norm()
                if not distance > torch.finfo(right.dtype).eps ** 0.5 * size:
                    continue
                what = f"differ by {float(distance / size):.2g} of their norm"
            raise StrategyError(
                f"The tensor ranks do not compute what one process does in {name or 'all'} ({type(whole).__name__}):",
                f"its outputs {what}. Either the plan splits what belongs together, or the code counts what a rank "
                "has only a part of, as view(batch, -1, self.num_heads, head_dim) does.",
                "Correct the plan, write view(batch, length, -1, head_dim), or leave the module out of the plan.",
            )

    handle = block.register_forward_hook(check, with_kwargs=True)


@torch.no_grad()
def _both(block: nn.Module, whole: nn.Module, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs in evaluation mode: of the ranks, and of the whole block. Collective."""
    held = {name: parameter.detach() for name, parameter in block.named_parameters()}
    weights = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in held.items()}
    # The block may change its buffers and arguments in place, and its backward pass needs those it has read.
    copied = partial(map_tensors, function=methodcaller("clone"))
    weights |= copied(dict(block.named_buffers()))
    mine, others = (copied((args, kwargs)) for _ in range(2))
    before = {module: vars(module).copy() for module in block.modules()}
    kind = next(iter(weights.values())).device.type
    # Weights that autocast keeps from here would have no gradient.
    uncached = torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    )
    try:
        for module, known in before.items():
            vars(module).update(training=False, _buffers=copied(known["_buffers"]))
        with uncached, preserved_rng(), warnings.catch_warnings():
            # Parts of parameters that are moved without gradients, as in every evaluation.
            warnings.filterwarnings("ignore", "To construct DTensor")
            # Without the hooks of the block itself: it is in a forward pass already.
            found = block.forward(*mine[0], **mine[1]), functional_call(whole, weights, *others)
    finally:
        for module, known in before.items():
            vars(module).update(known)
    ours, theirs = ([x for x in tensors_of(each) if x.is_floating_point()] for each in found)
    return ours, theirs


def _warn(name: str, error: Exception) -> None:
    get_logger(__name__).warning("Cannot compare %s with one process: %s", name or "the model", error)


def _without_cache(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_cache, value))
    return None if is_cache(value) else value
