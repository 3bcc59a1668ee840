"""Parameters that are frozen, unfrozen or added while a model is split."""

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
    """The parameters that FSDP has split, with either engine."""

    def __init__(self, outermost: nn.Module) -> None:
        super().__init__(outermost)
        self._first = set(self._known)
        self._is_within_update = False

    def __call__(self, outermost: Any, inputs: Any) -> None:
        # What is compiled takes no notes.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if self._is_stale[0] or list(map(requires_grad, self._parameters)) != self._flags:
            self._look(outermost)
        self._passes[0] += 1
        # The older engine's own.
        self._is_within_update = not vars(outermost).get("_sync_gradients", True)

    def _named(self, outermost: Any) -> list[tuple[str, nn.Parameter]]:
        split_again(outermost)  # or it holds other parameters in the place of those that are split
        # The older engine may have them gathered, too.
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
    """Let go of the parameters that a model has gathered; not within a pass. Mutates it.

    A forward pass that an error ended leaves the engine in the middle of it, where it splits nothing.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group._training_state = type(group._training_state).IDLE
            module.reshard()
