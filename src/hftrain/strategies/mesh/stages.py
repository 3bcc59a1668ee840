"""How one stage of a pipeline runs the model's own code, and what it sends to the others.

A stage calls the model's own forward with stand-ins for the parts that other stages compute: masks, positions and
everything that depends on a layer's index are computed by the model itself, from its own inputs, on every stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hftrain.core.errors import StrategyError, listed
from hftrain.core.tree import map_tensors, tensors_of
from hftrain.strategies.mesh.cutting import Cut, hollow
from hftrain.strategies.ranks import MemberRanks

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMS = 8


class Links:
    """The connections of a stage to the others; stages are named by their distance."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> list[torch.Tensor]:
        """Send tensors to stages, fill others with what stages send, and return these."""
        operations = [dist.P2POp(dist.isend, x.contiguous(), self._global(step), self.group) for x, step in sends]
        operations += [dist.P2POp(dist.irecv, x, self._global(step), self.group) for x, step in receives]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [x for x, _ in receives]

    def tell(self, hidden: torch.Tensor) -> None:
        """Send the next stage the dtype and shape of what follows."""
        header = [_DTYPES.index(hidden.dtype), hidden.dim(), *hidden.shape, *[0] * (_MAX_DIMS - hidden.dim())]
        self.exchange([(torch.tensor(header, device=hidden.device), +1)], [])

    def hear(self, device: torch.device) -> torch.Tensor:
        """Return a tensor like what the stage before sends next, without content."""
        header = torch.empty(2 + _MAX_DIMS, dtype=torch.int64, device=device)
        kind, dims, *shape = self.exchange([], [(header, -1)])[0].tolist()
        return torch.empty(shape[:dims], dtype=_DTYPES[kind], device="meta")

    def broadcast_object(self, value: Any, device: torch.device) -> Any:
        """Return the last stage's value, after a JSON round trip."""
        return MemberRanks(self.group, device).broadcast_object(value, self.size - 1)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the last stage's tensor."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, self._global(self.size - 1 - self.rank), self.group)
        return tensor

    def _global(self, step: int) -> int:
        return dist.get_global_rank(self.group, self.rank + step)


class Stage:
    """One stage of a model that is cut: runs the model's own forward on its layers.

    Args:
        model: The whole model; its parameters of other stages may be on the meta device.
    """

    def __init__(self, model: nn.Module, cut: Cut, links: Links) -> None:
        self.model, self.cut, self.links, self.index = model, cut, links, links.rank
        self.own = range(cut.bounds[self.index], cut.bounds[self.index + 1])
        self.is_first, self.is_last = self.index == 0, self.index == cut.num_stages - 1
        self.takes = inspect.signature(model.forward).parameters
        # Whether the loss is a mean over next tokens, so that items can be counted here.
        self.is_causal = getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
        # What shapes batches of each form lead to.
        self.forms: dict[Any, Any] = {}
        self.dtype: torch.dtype | None = None
        self.device = torch.device("cpu")  # of the batch
        # The type of the model's outputs.
        self.kind: Any = dict
        # Layers of an `nn.Sequential`, and those with convolutions of images, may differ in what they take.
        body = model.get_submodule(cut.layers)
        self.changes_shapes = isinstance(body, nn.Sequential) or any(isinstance(x, nn.Conv2d) for x in body.modules())
        # Copies on the meta device, which tell the shapes of what other stages compute: made before hooks are added.
        names = [*cut.parts, *(map(cut.layer, range(len(cut.children))) if self.changes_shapes else ())]
        self.shapes = {name: hollow(model.get_submodule(name)) for name in names}
        # Whether layers' arguments are checked, which synchronises: for the first batch of each form.
        self.checks = True
        # Whether a running forward computes the model's outputs.
        self.has_head = False
        # Where a running forward is: before the layers that run here, among them, or after them.
        self._phase = "before"

    def layers(self) -> list[nn.Module]:
        """Return this stage's layers."""
        return [self.model.get_submodule(self.cut.layer(index)) for index in self.own]

    def run(self, args: Any, kwargs: Any, received: torch.Tensor | None) -> torch.Tensor:
        """Return what this stage's layers make of the hidden states that the stage before sent."""
        _, hidden = self._call(args, kwargs, received, self.own, has_head=False)
        assert hidden is not None
        return hidden

    def finish(self, args: Any, kwargs: Any, hidden: torch.Tensor, layers: range | None = None) -> Any:
        """Return the model's outputs from the hidden states before `layers` (default: after the last layer)."""
        end = self.cut.bounds[-1]
        return self._call(args, kwargs, hidden, layers or range(end, end), has_head=True)[0]

    def _call(
        self, args: Any, kwargs: Any, hidden: torch.Tensor | None, layers: range, *, has_head: bool
    ) -> tuple[Any, torch.Tensor | None]:
        """Call the model with its `layers` only, and the parts after them if `has_head`."""
        get, self._phase, self.has_head = self.model.get_submodule, "before", has_head
        # A weight that autocast has cast for the micro-batch before would get this one's gradient too late for FSDP.
        torch.clear_autocast_cache()
        self.dtype = None if hidden is None else hidden.dtype
        is_here = {True: has_head, False: self.is_first}
        blanks = {name: stage > 0 for name, stage in self.cut.parts.items() if not is_here[stage > 0]}
        stand_ins: dict[str, nn.Module] = {}
        for index in range(len(self.cut.children)):
            name = self.cut.layer(index)
            if hidden is not None and index == layers.start - 1:
                stand_ins[name] = _HiddenStates(get(name), self, hidden)
            elif index >= layers.stop and self.changes_shapes:
                blanks[name] = True
            elif index not in layers:
                stand_ins[name] = _Identity(get(name))
        stand_ins.update({name: _MetaPart(get(name), self, name, is_late=late) for name, late in blanks.items()})
        keeper = None
        if layers:
            name = self.cut.layer(layers[-1])
            keeper = stand_ins[name] = _Recorder(get(name), self, name)
        with _standing_in(self.model, stand_ins):
            outputs = self.model(*args, **kwargs)
        self.kind = type(outputs)
        return outputs, keeper.value if keeper is not None else None


class _StandIn(nn.Module):
    """Takes a module's place in a forward; shows its attributes, which models read (a layer's type of attention)."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.real = real

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("real"), name)


class _Identity(_StandIn):
    """A layer of another stage: passes its input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]


class _HiddenStates(_StandIn):
    """The layer before this stage's first one: returns what the stage before sent."""

    def __init__(self, real: nn.Module, stage: Stage, value: torch.Tensor) -> None:
        super().__init__(real)
        self.stage, self.value = stage, value

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # What comes from parts that only other stages have holds NaN here.
        arguments = {**{f"argument {index}": value for index, value in enumerate(args[1:], 2)}, **kwargs}
        for name in ("hidden_states", "num_items_in_batch"):  # which records whether the model reads it
            arguments.pop(name, None)
        if self.stage.checks and (names := [name for name, value in arguments.items() if _has_nan(value)]):
            raise StrategyError(
                f"Cannot run {type(self.stage.model).__name__} as a pipeline.",
                f"Its layers need {listed(names)}, computed by parameters that only another stage has.",
                "Use pp_size=1 for this model.",
            )
        self.stage._phase = "inside"
        return self.value


class _Recorder(_StandIn):
    """The last layer that runs here: keeps its output, which crosses to the next stage."""

    def __init__(self, real: nn.Module, stage: Stage, name: str) -> None:
        super().__init__(real)
        self.stage, self.name = stage, name
        self.value: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        value = self.real(*args, **kwargs)
        if not isinstance(value, torch.Tensor):
            raise StrategyError(
                f"Cannot run {type(self.stage.model).__name__} as a pipeline.",
                f"{self.name} returns a {type(value).__name__}; one tensor can cross from stage to stage.",
                "Let the layers return hidden states only (as in transformers 5.3 and newer), or use pp_size=1.",
            )
        self.value, self.stage._phase = value, "after"
        return value


class _MetaPart(_StandIn):
    """A part of another stage: returns NaN in the shape of its output, computed on the meta device."""

    def __init__(self, real: nn.Module, stage: Stage, name: str, *, is_late: bool) -> None:
        super().__init__(real)
        self.stage, self.name, self.is_late = stage, name, is_late

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        phase = self.stage._phase
        if phase == "inside" if not self.is_late else phase != "after":
            raise StrategyError(
                f"Cannot run {type(self.stage.model).__name__} as a pipeline.",
                f"{self.name} is taken for a part that runs {'after' if self.is_late else 'before'} the layers, "
                "by the order in which the model registers its parts, and does not.",
                "Set the model's pipeline_parts to the names of its parts in running order.",
            )
        args, kwargs = map_tensors((args, kwargs), lambda x: x.to("meta"))
        with torch.no_grad():
            output = self.stage.shapes[self.name](*args, **kwargs)
        return map_tensors(output, self._nan)

    def _nan(self, like: torch.Tensor) -> torch.Tensor:
        value = float("nan") if like.is_floating_point() else 0
        # The precision may cast what the real part returns, and models give masks and rotations that dtype.
        dtype = self.stage.dtype if like.is_floating_point() and self.stage.dtype else like.dtype
        one = torch.full((), value, dtype=dtype, device=self.stage.device).expand(like.shape)
        # Logits can be large, and nothing changes them in place.
        return one if self.is_late else one.contiguous()


@contextmanager
def _standing_in(model: nn.Module, stand_ins: Mapping[str, nn.Module]) -> Iterator[None]:
    originals = {name: model.get_submodule(name) for name in stand_ins}
    try:
        for name, module in stand_ins.items():
            model.set_submodule(name, module)
        yield
    finally:
        for name, module in originals.items():
            model.set_submodule(name, module)


def _has_nan(tree: Any) -> bool:
    return any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in tensors_of(tree))
