"""Forward passes through the uncompiled model without side effects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hftrain.core.seed import preserved_rng

_INTERNAL = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_LIBRARIES = frozenset(
    {"accelerate", "bitsandbytes", "deepspeed", "hftrain", "peft", "torch", "torchao", "transformers"}
)


def _is_users(hook: Any) -> bool:
    """Return whether a forward hook is user code, which must only run for the run's own batches."""
    function = getattr(hook, "func", hook)
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] not in _LIBRARIES


@contextmanager
def without_trace(model: torch.nn.Module, *, is_whole: bool) -> Iterator[None]:
    """Call the uncompiled model in evaluation mode, and restore everything that this changes.

    Args:
        model: The model without the strategy's wrapper, unless the wrapper splits it.
        is_whole: Whether no engine splits the model; such an engine keeps its own state in the modules.
    """
    modules = list(model.modules())
    kept = [_Kept(module, is_whole=is_whole) for module in modules]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with preserved_rng(), torch.no_grad():
            for module in modules:
                module.training, module._compiled_call_impl = False, None
            yield
    finally:
        for each in kept:
            each.restore()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


class _Kept:
    """The state of a module that calling it, or preparing the call, may change.

    Args:
        module: The user's forward hooks are removed from it.
        is_whole: Also keep its attributes, and the contents of (nested) lists, dicts and sets in them.
    """

    def __init__(self, module: torch.nn.Module, *, is_whole: bool) -> None:
        self._own = own = vars(module)
        self._training, self._call, self._buffers = module.training, module._compiled_call_impl, dict(module._buffers)
        # Empty ones too: transformers models add hooks in their first call and record that they did.
        self._hooks = {name: own[name] for name in _HOOKS if is_whole}
        self._attributes: dict[str, tuple[Any, list[tuple[Any, Any]]]] | None = None
        if is_whole:
            values = {name: value for name, value in own.items() if name not in _INTERNAL}
            self._attributes = {name: (value, list(_contents(value))) for name, value in values.items()}
        for name, hooks in self._hooks.items():
            own[name] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_users(hook))

    def restore(self) -> None:
        """Restore everything."""
        own = self._own
        own.update(self._hooks, training=self._training, _compiled_call_impl=self._call)
        own["_buffers"].update(self._buffers)
        if self._attributes is None:
            return
        for name in own.keys() - self._attributes.keys() - _INTERNAL:
            del own[name]
        for name, (value, contents) in self._attributes.items():
            own[name] = value
            for container, content in contents:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)


def _contents(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield the plain containers in a value, itself included, each with a copy of its contents."""
    if type(value) in (list, dict, set) and depth < 8:
        yield value, value.copy()
        for each in list(value.values()) if isinstance(value, dict) else list(value):
            yield from _contents(each, depth + 1)
