"""Models on the meta device: parameters that take no memory, and the files that hold their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hftrain.core.types import StoredTensor

# By module, so that wrapping a model (with adapters) and casting it keep them.
_stored: WeakKeyDictionary[nn.Module, dict[str, StoredTensor]] = WeakKeyDictionary()

_running: list[Any] = []


@contextmanager
def weightless() -> Iterator[None]:
    """Put the parameters of modules on the meta device as they are made, so that none takes memory."""
    handle = register_module_parameter_registration_hook(lambda module, name, parameter: meta_twin(parameter))
    _running.append(handle)
    try:
        yield
    finally:
        _running.remove(handle)
        handle.remove()


def is_weightless() -> bool:
    """Return whether models are built without weights now, to be looked at and not to be trained."""
    return bool(_running)


def meta_twin(parameter: Any) -> Any:
    """Return a parameter on the meta device, the same for each of its homes."""
    if parameter is None or parameter.is_meta:
        return parameter
    meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    return vars(parameter).setdefault("_weightless", meta)


def attach_stored(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Note where the values of a model's tensors are stored, by their names."""
    for name, value in stored.items():
        home, _, leaf = name.rpartition(".")
        _stored.setdefault(model.get_submodule(home), {})[leaf] = value


def stored_in(model: nn.Module, *, take: bool = False) -> dict[str, StoredTensor]:
    """Return what `attach_stored` noted; with `take`, forget it."""
    of = _stored.pop if take else _stored.get
    modules = model.named_modules()
    return {f"{prefix}.{leaf}".lstrip("."): each for prefix, module in modules for leaf, each in of(module, {}).items()}
