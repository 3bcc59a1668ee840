"""Parameters that are frozen, unfrozen or added while a model is sharded."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hftrain.core.log import get_logger
from hftrain.strategies.trainable_parameters import Follower

logger = get_logger(__name__)

_WRAPPER = "_fsdp_wrapped_module."


class SplitParameters(Follower):
    """The parameters that FSDP has sharded, with either engine."""

    syncs = "_sync_gradients"  # of the older engine only

    def _named(self, model: Any) -> list[tuple[str, nn.Parameter]]:
        split_again(model)  # otherwise it holds gathered parameters instead of the sharded ones
        # The older engine may also hold gathered parameters.
        known = set(map(id, self._parameters))
        found = [(name.replace(_WRAPPER, ""), p) for name, p in model.named_parameters() if id(p) not in known]
        return [*zip(self._names, self._parameters, strict=True), *found]

    def _act(self, model: Any, begun: dict[str, nn.Parameter], ended: list[str]) -> None:
        self._refuse_added({name: p for name, p in begun.items() if not isinstance(p, DTensor)})
        super()._act(model, begun, ended)
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
