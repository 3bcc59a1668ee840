"""Parameters that are frozen, unfrozen or added while a model is sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hftrain.core.log import get_logger
from hftrain.strategies.unfreezing import Follower, refuse_added, requires_grad

logger = get_logger(__name__)

_WRAPPER = "_fsdp_wrapped_module."


class SplitParameters(Follower):
    """The parameters that FSDP has sharded, with either engine."""

    def __init__(self, outermost: nn.Module) -> None:
        super().__init__(outermost)
        self._first = set(self._known)
        self._is_within_update = False

    def __call__(self, outermost: Any, inputs: Any) -> None:
        # Compiled code must not contain this check.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if self._is_stale[0] or list(map(requires_grad, self._parameters)) != self._flags:
            self._look(outermost)
        self._passes[0] += 1
        # An attribute of the older engine only.
        self._is_within_update = not vars(outermost).get("_sync_gradients", True)

    def _named(self, outermost: Any) -> list[tuple[str, nn.Parameter]]:
        split_again(outermost)  # otherwise it holds gathered parameters instead of the sharded ones
        # The older engine may also hold gathered parameters.
        known = list(zip(self._names, self._parameters, strict=True))
        found = [(name.replace(_WRAPPER, ""), p) for name, p in outermost.named_parameters()]
        return known + [(name, p) for name, p in found if id(p) not in self._known]

    def _check(self, outermost: Any, begun: list[nn.Parameter]) -> None:
        names = self._trained()
        refuse_added([names[id(p)] for p in begun if id(p) not in self._first and not isinstance(p, DTensor)])

    def _act(self, outermost: Any, begun: list[nn.Parameter]) -> None:
        if self._is_within_update:
            logger.warning(
                "The set of trained parameters changed between two micro-batches of an update. strategy='fsdp1' "
                "uses the set at the end of the update for all of it. Make the change in on_step_end, or "
                "use strategy='fsdp'."
            )


def split_again(model: nn.Module) -> None:
    """Free a model's gathered parameters; must not be called within a pass. Mutates the model.

    After a forward pass that raised an error, the engine's state is mid-forward, in which it would not reshard.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group._training_state = type(group._training_state).IDLE
            module.reshard()
