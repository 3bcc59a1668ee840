"""What several strategies ask of a model: that it is whole, and that there is something to train."""

from __future__ import annotations

from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.core.parameters import is_partitioned


def check_whole(model: nn.Module, *, name: str, world_size: int) -> None:
    """Raise where another strategy has split a model: what it left would train or exchange parts as if whole.

    Args:
        model: The model, in no wrapper that its strategy knows.
        name: The strategy that is to take it.
        world_size: The number of processes.

    Raises:
        ConfigError: FSDP or ZeRO-3 has split it.
    """
    # In a group of one, FSDP's parts are the whole; ZeRO-3 leaves empty parameters there too.
    by_fsdp = world_size > 1 and any(getattr(module, "_is_fsdp_managed_module", False) for module in model.modules())
    by_zero = is_partitioned(model)
    if by_fsdp or by_zero:
        raise ConfigError(
            f"Cannot use strategy={name!r} with this {type(model).__name__}:",
            f"{'FSDP' if by_fsdp else 'ZeRO-3'} has split it among processes already, for another strategy.",
            "Keep that strategy (strategy=trainer.strategy), or build the model again and load the saved weights.",
        )


def check_trainable(model: nn.Module, *, name: str) -> None:
    """Raise where a strategy is to exchange or split the gradients of a model that has none.

    Raises:
        ConfigError: No parameter requires a gradient.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"Cannot train {type(model).__name__} with strategy={name!r}:",
            "none of its parameters requires a gradient.",
            "Call requires_grad_(True) on some, or use strategy='single'.",
        )
