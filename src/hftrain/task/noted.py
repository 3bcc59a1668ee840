"""An item count that records how it is used: whether a user's function computes with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Operations that say nothing about the loss, and operations whose result is the count itself.
_IDLE = frozenset(
    {"__get__", "__repr__", "__str__", "__format__", "__bool__", "__hash__", "__len__", "dim", "size", "numel"}
    | {"__eq__", "__ne__", "__gt__", "__ge__", "__lt__", "__le__", "eq", "ne", "gt", "ge", "lt", "le", "get_device"}
)
_PASSING = frozenset(
    {"to", "cpu", "cuda", "clone", "detach", "float", "double", "half", "bfloat16", "int", "long", "type", "clamp"}
    | {"clamp_min", "clip", "contiguous", "view", "reshape", "squeeze", "unsqueeze", "expand", "__deepcopy__"}
)


@dataclass(slots=True)
class Note:
    """How a count was used.

    Args:
        is_read: Whether code computed with it or read its value.
        divides: Whether the task's loss divides by it; None until it is passed to the task.
    """

    is_read: bool = False
    divides: bool | None = None


class NotedCount(torch.Tensor):
    """A 0-d count that behaves like any other tensor and records whether it is used in a computation."""

    note: Note

    @classmethod
    def make(cls, count: int | torch.Tensor, note: Note) -> NotedCount:
        """Return a noted count of the same value."""
        noted = torch.as_tensor(count).detach().as_subclass(cls)
        noted.note = note
        return noted

    def handed_on(self, *, divides: bool) -> torch.Tensor:
        """Return the count as a plain tensor; record in its note whether the task's loss divides by it."""
        self.note.divides = divides
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

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
