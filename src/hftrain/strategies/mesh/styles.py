"""How the tensor ranks share one module: which parts of its parameters each holds, and what moves before and after it.

Between modules, activations are plain tensors. A module computes with the local parts of its parameters, which are put
in place for the time of its forward pass, so its own code runs unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from hftrain.core.errors import StrategyError
from hftrain.strategies.mesh.moves import Apart, enter, join, leave, scatter_sum, split
from hftrain.strategies.mesh.proof import Proof

# The attribute of a head whose outputs stay parts, because the ranks share the loss.
SHARES_LOSS = "_shares_loss"


@dataclass(kw_only=True)
class TensorRanks:
    """The ranks that share each layer.

    Args:
        mesh: Their mesh, of one dimension.
        apart: Their random numbers where they hold different parts.
        sequence: Whether they also share the activations between the layers now, along the sequence.
        proof: What is noted of gradients up to the first update.
    """

    mesh: DeviceMesh
    apart: Apart
    sequence: bool = False
    length: int = 0
    proof: Proof = field(default_factory=Proof)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """This rank's place."""
        return int(self.mesh.get_local_rank())

    def note(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return a module's output, whose gradient all ranks must share; the first update checks it."""
        self.proof.note(self.proof.same, module, x)
        return x.clone()  # a view of what was exchanged, which nothing might change in place

    def part(self, module: nn.Module, *_: Any) -> None:
        """Draw different random numbers from here on, in training. With a shared sequence, the ranks do so anyway."""
        if module.training and not self.sequence:
            self.apart.open()

    def meet(self, *_: Any) -> None:
        """Draw the same random numbers again. With a shared sequence, the layer's end does so."""
        if not self.sequence:
            self.apart.close()

    def check_met(self) -> None:
        """Raise if the model ended where the ranks hold different parts."""
        if self.apart.is_open:
            self.apart.close()
            raise StrategyError(
                "The tensor ranks end the forward pass with different parts of the activations:",
                "the plan splits a module column-wise, and none that follows it row-wise.",
                "End with the style 'rowwise' or 'colwise_gather_output'.",
            )


@dataclass(frozen=True, kw_only=True)
class Style:
    """How the tensor ranks share a module: each computes with all of it; subclasses say what is split and moves.

    Args:
        partial: Whether a parameter that each rank holds whole gets only a part of its gradient on each.
    """

    partial: bool = False

    def dims(self, module: nn.Module) -> dict[str, int]:
        """Return the dimension along which each parameter is sharded; the others are held whole."""
        return {}

    def local(self, module: nn.Module, name: str, parameter: DTensor, ranks: TensorRanks) -> torch.Tensor:
        """Return what a rank computes with."""
        place: Placement = parameter.placements[-1]
        if isinstance(place, Shard) and (count := self.packed_in(name)) > 1:
            whole = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            parts = [matrix.chunk(ranks.size, place.dim)[ranks.rank] for matrix in whole.chunk(count, place.dim)]
            return torch.cat(parts, place.dim)
        is_part = self.partial or ranks.sequence
        grads = place if isinstance(place, Shard) else Partial() if is_part else Replicate()
        local = parameter.to_local(grad_placements=[grads])
        if self.partial and not ranks.sequence:
            ranks.proof.note(ranks.proof.parts, module, local)
        return local

    def packed_in(self, name: str) -> int:
        """Return how many equal matrices are stored next to each other in a parameter."""
        return 1

    def before(self, module: nn.Module, ranks: TensorRanks, x: Any) -> Any:
        """Return the module's input on this rank."""
        return x

    def after(self, module: nn.Module, ranks: TensorRanks, x: Any) -> Any:
        """Return the module's output."""
        return x


@dataclass(frozen=True, kw_only=True)
class Colwise(Style):
    """A linear layer whose outputs are shared out, or an embedding whose columns are.

    Args:
        gathers: Whether the outputs are put together afterwards.
        packed: The number of equal matrices that are stored next to each other (queries, keys and values, say): each
            rank computes its part of each. Their storage is sharded and gathered for the computation.
    """

    gathers: bool = False
    packed: int = 1

    def dims(self, module: nn.Module) -> dict[str, int]:
        return {"weight": 0 if isinstance(module, nn.Linear) else 1, "bias": 0}

    def packed_in(self, name: str) -> int:
        return self.packed

    def before(self, module: nn.Module, ranks: TensorRanks, x: Any) -> Any:
        whole = ranks.sequence or not x.is_floating_point()
        return x if whole else enter(ranks.proof.note_input(module, x), ranks.mesh)

    def after(self, module: nn.Module, ranks: TensorRanks, x: Any) -> Any:
        if not self.gathers or SHARES_LOSS in vars(module):
            return x
        # In a layer with a shared sequence, gradients stay partial up to the layer's end.
        joined = join(x, ranks.mesh, -1, sums=ranks.sequence)
        return joined if ranks.sequence else ranks.note(module, joined)


@dataclass(frozen=True, kw_only=True)
class Rowwise(Style):
    """A linear layer whose inputs are shared out and whose outputs are summed.

    Args:
        splits: Whether the inputs arrive whole.
    """

    splits: bool = False

    def dims(self, module: nn.Module) -> dict[str, int]:
        return {"weight": 0 if is_conv1d(module) else 1}

    def before(self, module: nn.Module, ranks: TensorRanks, x: Any) -> Any:
        if self.splits:
            x = ranks.proof.note_input(module, x)
            x = x.chunk(ranks.size, -1)[ranks.rank] if ranks.sequence else split(x, ranks.mesh, -1)
        bias = vars(module).get("bias")
        if bias is not None:  # added once, after the sum
            vars(module)["bias"] = torch.zeros_like(bias) if is_conv1d(module) else None
            vars(module)["_bias_after"] = bias
        return x

    def after(self, module: nn.Module, ranks: TensorRanks, x: Any) -> Any:
        bias = vars(module).pop("_bias_after", None)
        if ranks.sequence:
            x = F.pad(x, (0, 0, 0, -x.shape[1] % ranks.size))
            x = scatter_sum(x, ranks.mesh, 1)
            return x if bias is None else x + bias
        x = leave(x, ranks.mesh)
        if bias is None:
            return ranks.note(module, x)
        ranks.proof.note(ranks.proof.same, module, x)
        return x + bias  # a new tensor, so that nothing need be cloned


@dataclass(frozen=True, kw_only=True)
class SharedKey(Style):
    """The first projection of keys in latent attention (DeepSeek's), which every rank computes.

    Args:
        width: How many of the outputs, the last ones, are a part of the key of every head, on whichever rank that is.
    """

    width: int = 0

    def after(self, module: nn.Module, ranks: TensorRanks, x: Any) -> Any:
        if ranks.sequence:
            return x
        return torch.cat((x[..., : -self.width], enter(x[..., -self.width :], ranks.mesh)), -1)


@dataclass(frozen=True, kw_only=True)
class Vocabulary(Style):
    """An embedding whose rows are shared out; a rank looks up what it has, and the results are summed."""

    def dims(self, module: nn.Module) -> dict[str, int]:
        return {"weight": 0}

    def before(self, module: nn.Module, ranks: TensorRanks, x: Any) -> Any:
        num = len(vars(module)["weight"])
        row = x - ranks.rank * num
        is_outside = (row < 0) | (row >= num)
        attributes = vars(module)
        # A row of the whole table, also after an error.
        padding = attributes.pop("_outside", (None, attributes["padding_idx"]))[1]
        attributes["_outside"] = is_outside, padding
        attributes["padding_idx"] = padding - ranks.rank * num if padding is not None else None
        if padding is not None and not 0 <= attributes["padding_idx"] < num:
            attributes["padding_idx"] = None
        return row.masked_fill(is_outside, 0)

    def after(self, module: nn.Module, ranks: TensorRanks, x: Any) -> Any:
        is_outside, vars(module)["padding_idx"] = vars(module).pop("_outside")
        return ranks.note(module, leave(x.masked_fill(is_outside.unsqueeze(-1), 0), ranks.mesh))


@dataclass(frozen=True, kw_only=True)
class Experts(Style):
    """Experts in three-dimensional parameters, each shared out along its inner width; their outputs are summed.

    The module is called with the tokens, the numbers of the chosen experts and their weights.
    """

    def dims(self, module: nn.Module) -> dict[str, int]:
        return {"gate_up_proj": 1, "down_proj": 2}

    def packed_in(self, name: str) -> int:
        return 2 if name == "gate_up_proj" else 1

    def before(self, module: nn.Module, ranks: TensorRanks, x: Any) -> Any:
        return enter(x, ranks.mesh) if x.is_floating_point() else x

    def after(self, module: nn.Module, ranks: TensorRanks, x: Any) -> Any:
        return ranks.note(module, leave(x, ranks.mesh))


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's linear layer, whose weight is stored inputs first."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def uncalled(module: nn.Module) -> list[nn.Module]:
    """Return what a module owns and does not call: convolutions over time, and the last layer of torch's attention."""
    owns_all = isinstance(module, nn.MultiheadAttention)
    return [child for child in module.children() if owns_all or isinstance(child, nn.Conv1d)]


def apply_style(module: nn.Module, style: Style, ranks: TensorRanks, placed: Mapping[str, nn.Parameter]) -> None:
    """Give a module its sharded parameters and the hooks that compute with them. Mutates the module."""
    for name, parameter in placed.items():
        setattr(module, name, parameter)
    tensors = [(module, name) for name in placed]
    tensors += [(child, name) for child in uncalled(module) for name, _ in child.named_parameters(recurse=False)]
    is_experts = isinstance(style, Experts)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        for owner, name in tensors:
            vars(owner).pop(name, None)
            parameter = getattr(owner, name)
            if parameter.device_mesh.ndim > 1:
                raise StrategyError(
                    f"Cannot run {type(module).__name__} of a model on a mesh:",
                    "its parameters are not gathered, because it was called from outside of the model's forward pass.",
                    "Call the model, not its parts.",
                )
            vars(owner)[name] = style.local(owner, name, parameter, ranks)
        if is_experts:
            return tuple(style.before(module, ranks, x) for x in args), kwargs
        if args:
            return (style.before(module, ranks, args[0]), *args[1:]), kwargs
        keyword = next(iter(kwargs), None)
        return args, kwargs if keyword is None else {**kwargs, keyword: style.before(module, ranks, kwargs[keyword])}

    def end(module: nn.Module, args: Any, output: Any) -> Any:
        for owner, name in tensors:
            vars(owner).pop(name, None)
        # After an error, torch calls this hook without an output.
        return None if output is None else style.after(module, ranks, output)

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end, always_call=True)


def place(parameter: torch.Tensor, mesh: DeviceMesh, dim: int | None) -> nn.Parameter:
    """Return a parameter of which each rank holds its part along `dim`, or the whole with None; no communication."""
    local = parameter.detach()
    if dim is not None:
        local = local.chunk(mesh.size(), dim)[int(mesh.get_local_rank())].clone()
    placement: Placement = Replicate() if dim is None else Shard(dim)
    tensor = DTensor.from_local(
        local.contiguous(),
        mesh,
        [placement],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.contiguous().stride(),
    )
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)
