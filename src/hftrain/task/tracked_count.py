"""An item count that records whether anything read it: what was never read cannot have divided the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _is_cow_tensor  # type: ignore[attr-defined]
from torch.utils._pytree import tree_map

# Operations that reveal nothing of the value.
_IDLE = frozenset(
    {"__get__", "__hash__", "__len__", "dim", "ndimension", "size", "numel", "get_device", "element_size"}
    | {"is_floating_point", "is_complex", "is_contiguous", "stride"}
)
# Methods that return the count itself in another form.
_PASSING = (
    *("to", "cpu", "cuda", "clone", "detach", "float", "double", "half", "bfloat16", "int", "long", "type"),
    *("contiguous", "view", "reshape", "squeeze", "unsqueeze", "expand", "requires_grad_", "__deepcopy__"),
)


@dataclass(slots=True)
class ReadFlag:
    """Whether code computed with a count, compared it, printed it, or read its value in any other way.

    Args:
        copies: The counts that were given away. Each shares its memory until something takes it, as `to_dlpack` does.
    """

    is_read: bool = False
    copies: list[torch.Tensor] = field(default_factory=list)

    def found(self) -> bool:
        """Return whether the count was read until now."""
        return self.is_read or not all(map(_is_cow_tensor, self.copies))


class TrackedCount(torch.Tensor):
    """A 0-d count that behaves like any other tensor and records whether it is read, by Python or by compiled code."""

    note: ReadFlag
    plain: torch.Tensor

    @classmethod
    def make(cls, count: int | torch.Tensor, note: ReadFlag) -> TrackedCount:
        """Return a noted count of the same value."""
        plain = torch.as_tensor(count).detach()
        is_lazy = plain.device.type in ("cpu", "cuda")
        noted = (torch._lazy_clone(plain) if is_lazy else plain).as_subclass(cls)
        noted.note, noted.plain = note, plain
        note.copies += [noted] * is_lazy
        return noted

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts, args, kwargs = _plain(args, kwargs)
        result, name = function(*args, **kwargs), getattr(function, "__name__", "")
        for count in counts:
            if name == "__get__" and isinstance(result, torch.Tensor):
                return cls.make(result, count.note)
            count.note.is_read |= name not in _IDLE
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Reached from TorchScript and extensions, which Python's operators do not see.
        counts, args, kwargs = _plain(args, kwargs)
        for count in counts:
            count.note.is_read = True
        return function(*args, **kwargs)


def _plain(args: Any, kwargs: Any) -> tuple[list[TrackedCount], Any, Any]:
    """Return the counts among arguments, and the arguments with plain tensors in their place."""
    counts: list[TrackedCount] = []

    def unwrap(value: Any) -> Any:
        if not isinstance(value, TrackedCount):
            return value
        counts.append(value)
        return value.plain

    args, kwargs = tree_map(unwrap, (tuple(args), kwargs or {}))
    return counts, args, kwargs


def _passing(name: str) -> Callable[..., torch.Tensor]:
    def method(self: TrackedCount, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = getattr(self.plain, name)(*args, **kwargs)
        if torch.compiler.is_compiling():  # which knows the methods of plain tensors only
            self.note.is_read = True
            return result
        return TrackedCount.make(result, self.note)

    return method


for _name in _PASSING:
    setattr(TrackedCount, _name, _passing(_name))
