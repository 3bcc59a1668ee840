"""Whether a model is whole, or parts of it that another strategy made."""

from __future__ import annotations

from torch import nn

from hftrain.core.errors import ConfigError


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
    by_zero = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    if by_fsdp or by_zero:
        raise ConfigError(
            f"strategy={name!r} was given a {type(model).__name__}.",
            f"{'FSDP' if by_fsdp else 'ZeRO-3'} has split it among processes already, for another strategy.",
            "Go on with that one (strategy=trainer.strategy), or build the model again and load what was saved.",
        )
