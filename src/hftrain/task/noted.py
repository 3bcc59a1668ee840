"""An item count that records whether anything read it: what was never read cannot have divided the loss."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Operations that reveal nothing of the value, and operations that return the count itself in another form.
_IDLE = frozenset(
    {"__get__", "__hash__", "__len__", "dim", "ndimension", "size", "numel", "get_device", "element_size"}
    | {"is_floating_point", "is_complex", "is_contiguous", "stride", "requires_grad_"}
)
_PASSING = frozenset(
    {"__get__", "to", "cpu", "cuda", "clone", "detach", "float", "double", "half", "bfloat16", "int", "long", "type"}
    | {"contiguous", "view", "reshape", "squeeze", "unsqueeze", "expand", "requires_grad_", "__deepcopy__"}
)


@dataclass(slots=True)
class Note:
    """Whether code computed with a count, compared it, printed it, or read its value in any other way."""

    is_read: bool = False


class NotedCount(torch.Tensor):
    """A 0-d count that behaves like any other tensor and records whether it is read."""

    note: Note

    @classmethod
    def make(cls, count: int | torch.Tensor, note: Note) -> NotedCount:
        """Return a noted count of the same value."""
        dynamo: Any = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            # Code that is compiled runs as written where it meets the count.
            dynamo.config.nontraceable_tensor_subclasses.add(cls)
        noted = torch.as_tensor(count).detach().as_subclass(cls)
        noted.note = note
        return noted

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        for count in _counts_in(args, kwargs):
            if name in _PASSING and isinstance(result, torch.Tensor):
                return cls.make(result, count.note)
            count.note.is_read |= name not in _IDLE
        return result


def _counts_in(args: Any, kwargs: Any) -> Iterator[NotedCount]:
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, NotedCount):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _counts_in(value, None)
