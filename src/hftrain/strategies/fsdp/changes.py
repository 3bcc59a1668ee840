"""Parameters that are frozen, unfrozen or added while a model is sharded."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hftrain.strategies.trainable_parameters import Follower


class SplitParameters(Follower):
    """The parameters that FSDP has sharded."""

    def _named(self, model: Any) -> list[tuple[str, nn.Parameter]]:
        split_again(model)  # otherwise it holds gathered parameters instead of the sharded ones
        return super()._named(model)

    def _act(self, model: Any, begun: dict[str, nn.Parameter], ended: list[str]) -> None:
        self._refuse_added({name: p for name, p in begun.items() if not isinstance(p, DTensor)})
        super()._act(model, begun, ended)


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
