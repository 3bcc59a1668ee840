"""Checks that several strategies share: the model is not sharded, has trainable parameters, and uses them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from hftrain.core.errors import ConfigError, StrategyError, listed
from hftrain.core.log import get_logger
from hftrain.core.parameters import is_partitioned

_UNUSED = re.compile(r"which did not receive grad for rank \d+: ([\d ]+)")


def check_whole(model: nn.Module, *, name: str, world_size: int) -> None:
    """Raise `ConfigError` if another strategy has sharded a model: this one would take the shards for full tensors.

    Args:
        model: The model without a wrapper that belongs to the strategy.
        name: The name of the strategy that will train it.
    """
    # In a group of one, FSDP's shards are full tensors; ZeRO-3 leaves empty parameters there too.
    by_fsdp = world_size > 1 and any(getattr(module, "_is_fsdp_managed_module", False) for module in model.modules())
    by_zero = is_partitioned(model)
    if by_fsdp or by_zero:
        raise ConfigError(
            f"Cannot use strategy={name!r} with this {type(model).__name__}:",
            f"{'FSDP' if by_fsdp else 'ZeRO-3'} has split it among processes already, for another strategy.",
            "Keep that strategy (strategy=trainer.strategy), or build the model again and load the saved weights.",
        )


def check_trainable(model: nn.Module, *, name: str) -> None:
    """Raise `ConfigError` if a model has no gradients that a strategy could exchange or shard."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"Cannot train {type(model).__name__} with strategy={name!r}:",
            "none of its parameters requires a gradient.",
            "Call requires_grad_(True) on some, or use strategy='single'.",
        )


def warn_of_wrapper(asked: Sequence[str]) -> None:
    """Warn that settings of PyTorch's older FSDP, which wraps a model and its units, have no meaning."""
    get_logger(__name__).warning(
        "FSDP1, PyTorch's FullyShardedDataParallel, is no longer supported, and fully_shard (FSDP2) trains instead. It "
        "gathers the next unit while one computes, never more than two, and keeps the original parameters, so these "
        "have no effect: %s. Remove them, and use strategy='fsdp'.",
        ", ".join(asked),
    )


def unused_parameters(names: list[str]) -> StrategyError:
    """Return the error for parameters that a step left without a gradient while DDP waited for it."""
    return StrategyError(
        "Cannot average the gradients over the processes:",
        f"a step left parameters without a gradient ({listed(names, most=5)}), and DDP waits for each.",
        "Set ddp_find_unused_parameters=True (or strategy='ddp_find_unused') if some steps do not use them; otherwise "
        "remove them, or freeze them with requires_grad_(False).",
    )


def explain_unused(error: Exception, model: nn.Module) -> StrategyError | None:
    """Return the error that names the parameters which torch's DDP only numbers; None if it is about another thing."""
    told = _UNUSED.search(str(error)) if isinstance(error, RuntimeError) else None
    if told is None:
        return None
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return unused_parameters([trained[number] for number in map(int, told[1].split()) if number < len(trained)])
