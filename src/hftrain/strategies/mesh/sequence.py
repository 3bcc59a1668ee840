"""Split the sequence at a model's repeated layers: there each rank computes a part, elsewhere all compute the whole."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import ConfigError, StrategyError
from hftrain.core.parameters import layer_hint
from hftrain.core.tree import CACHES, map_tensors

# What runs inside the layers' forward pass, also when it is recomputed in the backward pass.
Region = Callable[[nn.Module], AbstractContextManager[Any]]

# A layer's argument with the regions it computes in; whatever recomputes the layer repeats its arguments.
_REGIONS = "split_regions"
# Layers whose sequence is split fill no cache: it would hold a part of the keys.
_CACHES = (*CACHES, "past_key_value", "layer_past")
# Attention takes what it needs of these itself.
_WHOLE = ("attention_mask",)


def find_layers(model: nn.Module, classes: Sequence[str] | None) -> tuple[nn.Module, list[nn.Module]]:
    """Find a model's repeated layers, and the module whose forward pass calls them.

    Args:
        classes: Class names of the layers; None uses the model's own hint, `_no_split_modules`.

    Raises:
        ConfigError: The model has no list of such layers or several, or other modules are among them.
    """
    class_names = set(layer_hint(model) if classes is None else classes)
    candidates = [each for each in _lists(model) if any(type(layer).__name__ in class_names for layer in each[1])]
    problem = "Cannot find the layers at which to split the sequence."
    if len(candidates) != 1:
        reason = f"{type(model).__name__} has {len(candidates)} lists of layers of the classes {sorted(class_names)}."
        raise ConfigError(problem, reason, "Name the class of one list, as in layer_classes=['LlamaDecoderLayer'].")
    names = {type(layer).__name__ for layer in candidates[0][1]}
    if names > class_names:
        raise ConfigError(problem, f"Among them are {sorted(names - class_names)}.", "Name all classes of the list.")
    return candidates[0]


def _lists(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    for owner in model.modules():
        if isinstance(owner, nn.Sequential):
            yield owner, list(owner)
        for child in owner.children():
            if isinstance(child, nn.ModuleList):
                yield owner, list(child)


@dataclass(kw_only=True, eq=False)
class SequenceSplit:
    """Hooks that split the hidden states of `[batch, sequence, width]` before the layers, and join them after the last.

    Splits may be nested: what is installed last splits last and joins first. A sequence that has no two positions for
    each rank stays whole, and all ranks compute the same.

    Args:
        owner: The module whose forward pass calls the layers.
        cut: Returns this rank's part of a tensor along a dimension; the ranks divide its length.
        join: Returns all ranks' parts, put together along a dimension.
        region: Makes, from the length of the whole sequence, what the layers compute in.
        along: The layers' arguments that are split, too, and the dimension of their sequence; empty if the layers
            take all arguments whole.
        multiple: What divides the length of a part.
    """

    owner: InitVar[nn.Module]
    layers: InitVar[Sequence[nn.Module]]
    parts: int
    cut: Callable[[torch.Tensor, int], torch.Tensor]
    join: Callable[[torch.Tensor, int], torch.Tensor]
    region: Callable[[int], Region]
    along: Mapping[str, int]
    multiple: int = 1

    def __post_init__(self, owner: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._splits: bool | None = None  # None outside of the owner's forward pass
        self._length: int | None = None  # of the whole sequence, from the cut to the join
        self._padded = 0  # the same, with what was appended
        for layer in layers:
            _let_compute_in_regions(layer)
            layer.register_forward_pre_hook(self._before, with_kwargs=True)
        owner.register_forward_pre_hook(self._open, with_kwargs=True)
        owner.register_forward_hook(self._close, always_call=True)
        layers[-1].register_forward_hook(self._after_last, prepend=True)

    def _open(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Who hands a cache over generates, which all ranks do alike.
        self._splits = owner.training or all(kwargs.get(name) is None for name in _CACHES)
        self._length, self._padded = None, 0

    def _close(self, owner: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        is_open, self._length, self._splits = self._length is not None, None, None
        if output is None:  # after an error
            return
        if is_open:
            reason = f"{type(owner).__name__} did not call its last layer, after which the parts are joined."
            raise StrategyError("Cannot split the sequence over ranks.", reason, "Disable LayerDrop and early exits.")
        if self._padded and isinstance(output, MutableMapping):
            for name in [key for key in output if key in CACHES]:
                output[name] = None  # the layers did not fill it

    def _before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._splits is None:
            raise StrategyError(
                f"Cannot split the sequence of {type(layer).__name__} over ranks.",
                "It was called outside of its model's forward pass, as checkpointing around a layer's hooks does.",
                "Use model.gradient_checkpointing_enable() of a transformers that checkpoints inside of the layers.",
            )
        names: Any = layer.split_arguments
        names = [*names, *(f"argument {index}" for index in range(len(names), len(args)))]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden = values[names[0]]
        if self._length is None:
            part = -(-hidden.shape[1] // (self.parts * self.multiple)) * self.multiple
            if not self._splits or part < 2:
                return None
            if hidden.dim() != 3:
                reason = f"The first argument of {type(layer).__name__} is not [batch, sequence, width]."
                raise StrategyError("Cannot split the sequence over ranks.", reason, shape=tuple(hidden.shape))
            self._length, self._padded = hidden.shape[1], part * self.parts
            values[names[0]] = self._part(hidden, 1)
        for name, value in values.items():
            if name not in (names[0], _REGIONS):
                values[name] = self._argument(name, value)
        args = tuple(values.pop(name) for name in names[: len(args)])
        return args, {**values, _REGIONS: [*kwargs.get(_REGIONS, ()), self.region(self._length)]}

    def _after_last(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._length is None:
            return output
        hidden, *others = output if isinstance(output, tuple) else (output,)
        if any(isinstance(other, torch.Tensor) for other in others):
            reason = f"{type(layer).__name__} returns more tensors than its hidden states."
            raise StrategyError("Cannot split the sequence over ranks.", reason, "Request no further outputs.")
        hidden = self.join(hidden, 1)[:, : self._length].clone(memory_format=torch.contiguous_format)
        self._length = None
        return (hidden, *others) if isinstance(output, tuple) else hidden

    def _argument(self, name: str, value: Any) -> Any:
        """Return what the layers get for an argument of the whole sequence."""
        if not self.along or name in _WHOLE:
            return value
        if name in _CACHES:
            if value is not None and value.get_seq_length():
                reason = (
                    "Its keys and values of earlier positions belong to no rank's part (prefix tuning, for example)."
                )
                raise StrategyError(f"Cannot split the sequence over ranks with {name}.", reason, "Use cp_size=1.")
            return None
        if name in self.along:
            return map_tensors(value, lambda tensor: self._part(tensor, self.along[name]))

        def refuse(tensor: torch.Tensor) -> torch.Tensor:
            if self._length in tensor.shape:
                raise StrategyError(
                    f"Cannot split the sequence over ranks: the layers take {name!r}.",
                    f"One of its dimensions is as long as the sequence ({self._length}), and may run along it.",
                    "Use cp_size=1 for this model.",
                    shape=tuple(tensor.shape),
                )
            return tensor

        return map_tensors(value, refuse)

    def _part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part; copies of the last position fill it up, as no other values are sure to be valid."""
        dim, length = dim % whole.dim(), whole.shape[dim]
        if length != self._length:
            return whole  # one value for all positions
        shape = [*whole.shape[:dim], self._padded - length, *whole.shape[dim + 1 :]]
        return self.cut(torch.cat([whole, whole.narrow(dim, length - 1, 1).expand(shape)], dim), dim)


def _let_compute_in_regions(layer: nn.Module) -> None:
    """Give a layer a class whose forward pass enters its regions; inside of what checkpoints a forward pass."""
    kind: Any = type(layer)
    if hasattr(kind, "split_arguments"):
        return

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for region in kwargs.pop(_REGIONS, ()):
                stack.enter_context(region(self))
            return kind.forward(self, *args, **kwargs)

    names = list(inspect.signature(kind.forward).parameters)[1:]
    members = {"forward": forward, "split_arguments": names, "__module__": kind.__module__}
    layer.__class__ = type(kind.__name__, (kind,), members)
