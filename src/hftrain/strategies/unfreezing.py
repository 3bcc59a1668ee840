"""Parameters that are frozen, unfrozen or added while a wrapper averages the gradients of those it was made for."""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from hftrain.core.errors import StrategyError, explain

_requires_grad = attrgetter("requires_grad")
_FOLLOWED = "_hftrain_follows_parameters"


def follow_parameters(wrapped: DistributedDataParallel) -> None:
    """Let a wrapper average the gradients of all parameters that require one, whenever they came to.

    DDP averages those that required one when it was made; the others' gradients would differ by rank, and the copies of
    the model drift apart. Before each forward pass that records gradients it is compared which do, which takes some 40
    nanoseconds for each parameter. All ranks must change the same ones.
    """
    if not hasattr(wrapped, _FOLLOWED):
        setattr(wrapped, _FOLLOWED, True)
        wrapped.register_forward_pre_hook(_Followed(wrapped))


class FixedParameters:
    """Which parameters of a model require a gradient, for an engine that cannot follow when that changes.

    Args:
        model: The model.
        engine: Its name for the error.
    """

    def __init__(self, model: nn.Module, *, engine: str) -> None:
        self._engine = engine
        self._names, self._parameters = map(list, zip(*model.named_parameters(), strict=True))
        self._flags = list(map(_requires_grad, self._parameters))

    def check(self) -> None:
        """Raise `StrategyError` if other parameters require a gradient than at first."""
        found = list(map(_requires_grad, self._parameters))
        if found != self._flags:
            names = [name for name, now, before in zip(self._names, found, self._flags, strict=True) if now != before]
            raise StrategyError(
                explain(
                    f"Cannot freeze or unfreeze {names[0]!r} while the training runs.",
                    f"{self._engine} decides when a run starts which parameters it trains.",
                    "Do it before train(), or end the run and resume it with the others frozen.",
                    changed=names,
                )
            )


class _Followed:
    """The parameters that a wrapper's reducer was made for; a forward pre-hook of the wrapper."""

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self._note(wrapped)
        self._is_stale = [False]
        for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
            # Holds the mark alone, so that the wrapper can be freed.
            hook = register(lambda *_, mark=self._is_stale: mark.__setitem__(0, True))
            weakref.finalize(wrapped, hook.remove)

    def _note(self, wrapped: DistributedDataParallel) -> None:
        self._parameters: list[nn.Parameter] = list(wrapped.module.parameters())
        self._flags = list(map(_requires_grad, self._parameters))

    def __call__(self, wrapped: DistributedDataParallel, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._is_stale[0] or list(map(_requires_grad, self._parameters)) != self._flags:
            self._is_stale[0] = False
            self._follow(wrapped)

    def _follow(self, wrapped: DistributedDataParallel) -> None:
        """Rebuild the reducer if other parameters require a gradient now; collective then."""
        before = {id(p) for p, required in zip(self._parameters, self._flags, strict=True) if required}
        self._note(wrapped)
        now = list(filter(_requires_grad, self._parameters))
        if {id(parameter) for parameter in now} == before:
            return
        for parameter in now:
            if id(parameter) not in before:
                torch.distributed.broadcast(parameter.detach(), src=0, group=wrapped.process_group)
        # What unpickling does: a reducer for what requires a gradient, all else as it was.
        wrapped.__setstate__(wrapped.__getstate__())  # type: ignore[no-untyped-call]
        for hook, state in wrapped._comm_hooks:
            torch.distributed._register_comm_hook(wrapped.reducer, state, hook)  # type: ignore[attr-defined]
