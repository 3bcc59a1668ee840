"""What one forward pass keeps for the backward pass, and moves among the ranks, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hftrain.strategies.mesh.layout import Layout
from hftrain.strategies.mesh.plans import Placing, find_plan, placings
from hftrain.strategies.mesh.styles import Colwise, Rowwise


@dataclass(kw_only=True)
class Saved:
    """What one forward pass keeps for the backward pass, and moves among the ranks.

    Args:
        layers: Bytes kept by each layer: whole on every tensor rank, and shared out. The last entry is what is kept
            outside of the layers: embeddings, logits, the loss.
        inputs: Bytes of each layer's inputs, which checkpointing keeps.
        largest: Bytes of the largest tensor of each layer, then of what is outside.
        reduced: Bytes that the tensor ranks sum in a forward and backward pass.
        exchanged: Bytes of queries, keys, values and results of attention.
    """

    layers: list[list[int]] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    largest: list[int] = field(default_factory=list)
    reduced: int = 0
    exchanged: int = 0
    found: list[Placing] = field(default_factory=list)

    def bytes(self, layout: Layout, layers: Collection[int], *, checkpointing: bool = False) -> int:
        """Return what some layers keep on a rank, temporary gradients of activations not counted."""
        each = [(self.layers[i][0] + self.layers[i][1] // layout.tp) // layout.cp for i in layers]
        inputs = sum(self.inputs[i] for i in layers) // layout.cp
        return inputs + max(each, default=0) if checkpointing else sum(each)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model on the meta device, and what a training step does with it.

    Args:
        module: The model in the dtype it computes in.
        units: Its layers, which are sharded and recomputed one by one.
        sizes: Bytes of an element of each parameter as it is kept, by name.
        compute_size: Bytes of an element while it computes.
        reduce_size: Bytes of an element of a gradient that is exchanged.
        state_ratio: Bytes of optimizer state for each byte of trainable parameters.
        casts: Whether autocast keeps copies of the parameters.
        forward: Runs a forward pass with one micro-batch.
        micro_batch: Its samples.
        accumulation: Micro-batches of a step.
        recomputes: Whether the script itself asks for checkpointing.
    """

    module: nn.Module
    units: Sequence[nn.Module]
    sizes: Mapping[str, int]
    compute_size: int
    reduce_size: int
    state_ratio: float
    casts: bool
    forward: Callable[[], Any]
    micro_batch: int
    accumulation: int = 1
    recomputes: bool = False


def trace(model: Model, tp: int) -> Saved:
    """Run a forward pass on the meta device and count what it keeps.

    Raises:
        ConfigError: So many tensor ranks cannot share the modules.
    """
    plan = placings(model.module, find_plan(model.module, None), tp) if tp > 1 else []
    num = len(model.units)
    saved = Saved(layers=[[0, 0] for _ in range(num + 1)], inputs=[0] * num, largest=[0] * (num + 1), found=plan)
    # Kept alive, so that no other storage takes the same identity.
    storages = [tensor.untyped_storage() for tensor in (*model.module.parameters(), *model.module.buffers())]
    known_storages: dict[int, Any] = {id(storage): storage for storage in storages}
    position = SimpleNamespace(unit=-1, shared=0)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in known_storages:
            known_storages[id(storage)] = storage
            saved.layers[position.unit][position.shared] += storage.nbytes()
            saved.largest[position.unit] = max(saved.largest[position.unit], storage.nbytes())
        return tensor

    def enter(index: int, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        position.unit = index
        saved.inputs[index] = _bytes(next(iter((*args, *kwargs.values())), None))

    def meet(placing: Placing, _: nn.Module, args: Any, output: Any) -> None:
        position.shared = 1 if placing.opens else 0 if placing.closes else position.shared
        if isinstance(placing.style, (Colwise, Rowwise)):
            saved.reduced += _bytes(args[0] if isinstance(placing.style, Colwise) else output)

    with ExitStack() as stack:
        for index, unit in enumerate(model.units):
            stack.callback(unit.register_forward_pre_hook(partial(enter, index), with_kwargs=True).remove)
            stack.callback(unit.register_forward_hook(lambda *_: setattr(position, "unit", -1)).remove)
        for each in plan:
            stack.callback(each.module.register_forward_hook(partial(meet, each)).remove)
        stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
        stack.enter_context(_Attention(saved))
        model.forward()
    return saved


# -- implementation ------------------------------------------------------------------------------------------------


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


class _Kept(torch.autograd.Function):
    """Attention that keeps what fused kernels keep: its arguments, its result and a sum for each row."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows = query.transpose(-3, -2)  # heads last, so that the output projection takes the result without a copy
        result = query.new_empty((*rows.shape[:-1], value.shape[-1])).transpose(-3, -2)
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pragma: no cover  # nothing goes backward
        raise NotImplementedError


class _Attention(TorchFunctionMode):
    """Compute attention as if by a fused kernel, and count its arguments."""

    def __init__(self, saved: Saved) -> None:
        super().__init__()
        self.saved = saved

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        arguments = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        inputs = [arguments[name] for name in ("query", "key", "value")]
        result: torch.Tensor = _Kept.apply(*inputs)  # type: ignore[no-untyped-call]
        self.saved.exchanged += sum(map(_bytes, (*inputs, result)))
        return result
