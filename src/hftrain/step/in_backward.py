"""Where optimizers that update during the backward pass can work."""

from __future__ import annotations

from typing import Any, TypeGuard

from hftrain.core.errors import ConfigError
from hftrain.core.types import Owns
from hftrain.optim.in_backward import UpdatesInBackward
from hftrain.precision.base import Precision
from hftrain.strategies.base import Strategy


def is_in_backward(optimizer: Any, *, strategy: Strategy) -> TypeGuard[UpdatesInBackward]:
    """Tell whether the optimizer updates during the backward pass; with several processes it cannot."""
    return isinstance(optimizer, UpdatesInBackward) and strategy.world_size == 1


def check_in_backward(optimizer: Any, *, strategy: Strategy, precision: Precision, accumulation: int) -> None:
    """Raise if the optimizer updates during the backward pass and something else needs the gradients first.

    Args:
        optimizer: An optimizer or its class.
        strategy: Launched or not.
        precision: The precision.
        accumulation: Micro-steps per update.

    Raises:
        ConfigError: Gradients would have to be averaged over processes, accumulated or unscaled.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(cls, UpdatesInBackward) or (cls.takes_ranks and strategy.world_size > 1):
        return
    reason = None
    if strategy.world_size > 1:
        reason = f"{strategy.world_size} processes would have to average the gradients first"
    elif accumulation > 1:
        reason = f"gradient_accumulation_steps={accumulation} would have to add them up first"
    elif precision.policy.loss_scaling:
        reason = f"precision={precision.policy.name!r} would have to unscale them first"
    elif Owns.BACKWARD in strategy.owns:
        reason = f"strategy={strategy.name!r} runs the backward pass itself"
    if reason:
        raise ConfigError(
            f"{cls.__name__} was asked for, which updates as soon as it has a gradient.",
            f"It cannot: {reason}.",
            "Use one process, gradient_accumulation_steps=1 and no fp16, or an optimizer that steps afterwards.",
        )
