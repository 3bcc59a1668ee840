"""Which strategies fit a model: what a rank keeps, and moves among the ranks, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hftrain.core.errors import ConfigError
from hftrain.strategies.mesh.cutting import Cut, divide
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


# Of a device's memory; the rest is for its runtime, the communication library and fragmentation.
USABLE = 0.9
# How many times longer a byte takes between machines than within one.
BETWEEN_MACHINES = 10


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with its memory and communication in each process; of a pipeline, in the stage that needs most.

    Units:
        bytes; `inside` and `between` are sent by a rank in one step, within a machine and between machines. `idle` is
        how long a stage waits for others, for each second that it computes.
    """

    strategy: str
    options: dict[str, Any]
    sizes: dict[str, int]
    micro_batch: int
    accumulation: int
    checkpointing: bool
    offload: bool
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int
    inside: int = 0
    between: int = 0
    idle: float = 0.0

    @property
    def cost(self) -> tuple[bool, float, int]:
        """By what candidates are compared: offloading, recomputing (a third) and waiting, then communication."""
        slower = self.checkpointing / 3 + self.idle
        return self.offload, slower, self.inside + BETWEEN_MACHINES * self.between

    @property
    def device(self) -> int:
        """The peak of device memory."""
        held = 0 if self.offload else self.parameters + self.gradients + self.optimizer
        return held + self.activations + self.temporary


def candidates(
    model: Model, gpus: int, machine: int, memory: float, *, as_set: bool = False
) -> tuple[list[Candidate], dict[str, str]]:
    """Return what fits, the best first (see `Candidate.cost`), and why the rest does not, by name.

    Args:
        machine: How many of them one machine has at most.
        memory: The memory of a device, in bytes.
        as_set: Keep the micro-batch and checkpointing of the script, and do not offload.
    """
    fits, reasons = [], {}
    traces: dict[int, Saved] = {}
    for name, layout, options in _layouts(gpus, machine, len(model.units)):
        label = f"{name} ({layout})"
        try:
            if layout.tp not in traces:
                traces[layout.tp] = trace(model, layout.tp)
            stage_cut = _cut(model, layout.pp) if layout.pp > 1 else None
        except ConfigError as error:
            reasons[label] = " ".join(str(error).split())
            continue
        settings = [(model.micro_batch, model.recomputes, False)] if as_set else _settings(model, layout)
        plan = partial(measure, model, saved=traces[layout.tp], machine=machine, layout=layout, cut=stage_cut)
        stage_plans = (
            [plan(name, options, setting=setting, stage=stage) for stage in range(layout.pp)] for setting in settings
        )
        attempts = [max(stages, key=lambda each: each.device) for stages in stage_plans]
        smallest = min(attempts, key=lambda each: each.device)
        choice = next((each for each in attempts if each.device <= memory * USABLE), None)
        if choice is None:
            reasons[label] = f"needs {smallest.device / 1e9:.1f} GB at least, of {memory * USABLE / 1e9:.1f} GB usable"
        else:
            fits.append(choice)
    return sorted(fits, key=lambda each: each.cost), reasons


def measure(
    model: Model,
    name: str,
    options: dict[str, Any],
    *,
    layout: Layout,
    saved: Saved,
    machine: int,
    setting: tuple[int, bool, bool],
    cut: Cut | None = None,
    stage: int = 0,
) -> Candidate:
    """Return the memory and communication of one way to train, in one stage of a pipeline; see `Candidate`."""
    micro_batch, checkpointing, offload = setting
    if offload:
        name, options = ("fsdp_offload", options) if name == "fsdp" else (name, {**options, "offload": True})
    scale = micro_batch / model.micro_batch
    # The global batch stays what it is on as many data ranks.
    accumulation = max(model.accumulation * model.micro_batch * layout.size // (micro_batch * layout.data_size), 1)
    turns = micro_batch if cut is not None else 1  # a pipeline's micro-batches are single samples
    parameters, trainable, units = _sizes(model, layout, saved.found, stage, cut)
    indices = [index for index, unit in enumerate(units[:-1]) if unit[0] or cut is None]
    compute_bytes, reduce_bytes = sum(unit[0] for unit in units), sum(unit[1] for unit in units)
    is_last, boundary = stage == layout.pp - 1, int(saved.inputs[indices[0]] * scale) if cut is not None else 0
    activations = saved.bytes(layout, indices, checkpointing=checkpointing) + sum(saved.layers[-1]) * is_last
    gradients, temporary = trainable, 2 * int(max(saved.largest[i] for i in (*indices, *[-1] * is_last)) * scale)
    if name not in ("single", "ddp"):
        # Two layers are gathered at once, and what is outside of them stays; one layer's gradients are exchanged.
        temporary += 2 * max(unit[0] for unit in units[:-1] or units) + units[-1][0] + max(x[1] for x in units)
        temporary += max(reduce_bytes - trainable, 0) if accumulation * turns > 1 else 0  # whole until the last one
        temporary += trainable if cut is not None and accumulation > 1 else 0
    else:
        gradients += trainable if layout.dp_replicate > 1 else 0  # DDP's buckets
        temporary += compute_bytes if model.casts else 0
    plan = Candidate(
        strategy=name,
        options=options | ({"num_micro_batches": turns} if cut is not None else {}),
        sizes=layout.sizes,
        micro_batch=micro_batch,
        accumulation=accumulation,
        checkpointing=checkpointing,
        offload=offload,
        parameters=parameters,
        gradients=gradients,
        optimizer=int(trainable * model.state_ratio),
        activations=int(activations * scale) + boundary,
        temporary=temporary,
        idle=(layout.pp - 1) / turns,
    )
    sent_bytes = boundary * (1 if stage == 0 or is_last else 2)
    return replace(plan, **_traffic(plan, layout, saved, machine, scale, compute_bytes, reduce_bytes, sent_bytes))


def _cut(model: Model, stages: int) -> Cut:
    cut = divide(model.module, stages)
    if {model.module.get_submodule(cut.layer(index)) for index in range(len(cut.children))} != {*model.units}:
        reason = f"The layers that stages are cut from ({cut.layers or 'the whole model'}) are not those counted here."
        raise ConfigError(f"Cannot plan {stages} stages.", reason, "Use fewer stages.")
    return cut


def _sizes(
    model: Model, layout: Layout, placings: Sequence[Placing], stage: int, cut: Cut | None
) -> tuple[int, int, list[list[int]]]:
    """Return the bytes of a rank's parameters, of those that train, and what each layer gathers and exchanges."""
    dims = {id(p): each.dims.get(key) for each in placings for key, p in each.module.named_parameters(recurse=False)}
    unit_of = {id(p): index for index, unit in enumerate(model.units) for p in unit.parameters()}
    total, trainable = sum(each.nbytes for each in model.module.buffers()), 0
    units = [[0, 0] for _ in range(len(model.units) + 1)]  # the last one is what is outside of the layers
    for key, parameter in model.module.named_parameters():
        if cut is not None and stage not in cut.owners[key]:
            continue
        shape = list(parameter.shape)
        if (dim := dims.get(id(parameter))) is not None:
            shape[dim] //= layout.tp
        num = torch.Size(shape).numel()
        share = num if not shape else num // max(shape[0], 1) * -(-shape[0] // layout.shard_size)
        total += share * model.sizes[key]
        trainable += share * model.sizes[key] * parameter.requires_grad
        part = units[unit_of.get(id(parameter), -1)]
        part[0] += num * model.compute_size
        part[1] += num * model.reduce_size * parameter.requires_grad
    return total, trainable, units


def _layouts(gpus: int, machine: int, num_layers: int) -> Iterator[tuple[str, Layout, dict[str, Any]]]:
    if gpus == 1:
        yield "single", Layout(), {}
        return
    yield "ddp", Layout(dp_replicate=gpus), {}
    yield "fsdp", Layout(dp_shard=gpus), {}
    if gpus > machine and gpus % machine == 0 and machine > 1:
        yield "hsdp", Layout(dp_replicate=gpus // machine, dp_shard=machine), {}
    sizes = [size for size in range(2, min(gpus, machine) + 1) if gpus % size == 0 and machine % size == 0]
    for size in sizes:
        name = "fsdp_tp" if size < gpus else "tp"
        yield name, Layout(dp_shard=gpus // size, tp=size), {"tp_size": size}
        if gpus > machine > size and gpus % machine == 0:
            yield "hsdp_tp", Layout(dp_replicate=gpus // machine, dp_shard=machine // size, tp=size), {"tp_size": size}
    for size in sizes:
        yield "fsdp_cp", Layout(dp_shard=gpus // size, cp=size), {"cp_size": size}
    for size in (size for size in range(2, min(gpus, num_layers) + 1) if gpus % size == 0):
        yield "fsdp_pp" if size < gpus else "pp", Layout(dp_shard=gpus // size, pp=size), {"pp_size": size}


def _settings(model: Model, layout: Layout) -> Iterator[tuple[int, bool, bool]]:
    """Yield micro-batches, checkpointing and offloading, the cheapest first."""
    most = model.micro_batch * layout.pp  # a pipeline has fewer data ranks, and is fed more at once
    batches = [size for size in range(most, 0, -1) if most % size == 0]
    for offload in (False, True) if layout.dp_shard > 1 and layout.pp == 1 else (False,):
        for checkpointing in (False, True) if model.units else (False,):
            yield from ((size, checkpointing, offload) for size in batches)


def _traffic(
    candidate: Candidate,
    layout: Layout,
    saved: Saved,
    machine: int,
    scale: float,
    compute_bytes: int,
    reduce_bytes: int,
    sent_bytes: int,
) -> dict[str, Any]:
    """Return what a rank sends in a step.

    `compute_bytes` of parameters are gathered, `reduce_bytes` of their gradients; a stage sends others `sent_bytes`
    for a micro-batch, which is `scale` of those of `saved`.
    """
    shards, copies, times = layout.shard_size, layout.dp_replicate, candidate.accumulation
    passes = scale * (1.5 if candidate.checkpointing else 1)
    # A pipeline gathers for each of its micro-batches, and does not defer the exchange of gradients.
    gathers, reduces = 2 * times * candidate.options.get("num_micro_batches", 1), times if layout.pp > 1 else 1
    traffic = {
        "shards": _part(shards) * (gathers * compute_bytes + reduces * reduce_bytes),
        "copies": 2 * _part(copies) * reduces * reduce_bytes / shards,
        "layers": times * passes * 2 * _part(layout.tp) * saved.reduced / layout.cp,
        "sequence": times * passes * 2 * _part(layout.cp) * saved.exchanged / layout.cp / layout.tp,
        "stages": times * sent_bytes,
    }
    spans = {"shards": shards * layout.tp, "copies": layout.size // layout.pp, "stages": layout.size}
    between = sum(int(size) for kind, size in traffic.items() if spans.get(kind, 0) > machine)
    return {"inside": sum(map(int, traffic.values())) - between, "between": between}


def _part(ranks: int) -> float:
    """Return the share of a whole that a rank sends in an all-gather or a reduce-scatter."""
    return (ranks - 1) / ranks
