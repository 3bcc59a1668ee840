"""The one owner of how a model is called: as it is written or compiled, under autocast, and observed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hftrain.core.tree import map_tensors

_HALVES = (torch.bfloat16, torch.float16)


def to_float32(tree: Any) -> Any:
    """Return the same structure with its half-precision tensors in float32."""
    return map_tensors(tree, lambda tensor: tensor.float() if tensor.dtype in _HALVES else tensor)


class ModelCall:
    """What runs when a model is called. It replaces the call in the model itself, so wrappers keep working.

    torch keeps a compiled call in an attribute that is part of neither copies nor saved models; this object stands
    there while one of its attributes is set. Set attributes with `set`.

    Attributes:
        compiled: Called in place of the model's own code.
        autocast: Returns the context that the model runs in; its half-precision outputs are returned in float32.
        observe: Called with the arguments, the keyword arguments and the outputs after each call.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._former_call = model._compiled_call_impl
        self.compiled: Callable[..., Any] | None = None
        self.autocast: Callable[[], AbstractContextManager[Any]] | None = None
        self.observe: Callable[[tuple[Any, ...], dict[str, Any], Any], None] | None = None

    @classmethod
    def of(cls, model: nn.Module) -> ModelCall:
        """Return the call of a model, which changes nothing until `set`."""
        current = model._compiled_call_impl
        return current if isinstance(current, cls) else cls(model)

    def set(self, **attributes: Any) -> None:
        """Set attributes, and take the place of the model's call, or give it back once nothing is set."""
        for name, value in attributes.items():
            setattr(self, name, value)
        is_on = any(value is not None for value in (self.compiled, self.autocast, self.observe))
        self._model._compiled_call_impl = self if is_on else self._former_call

    @property
    def as_written(self) -> Callable[..., Any]:
        """The model's own code, with its hooks."""
        return self._model._call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.compiled or self._former_call or self.as_written
        if self.autocast is None:
            outputs = call(*args, **kwargs)
        else:
            with self.autocast():
                outputs = call(*args, **kwargs)
            outputs = to_float32(outputs)
        if self.observe is not None:
            self.observe(args, kwargs, outputs)
        return outputs
