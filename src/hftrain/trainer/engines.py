"""Strategies whose engine makes the optimizer or the schedule, or takes them over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.core.types import Owns
from hftrain.strategies.base import Strategy
from hftrain.task.module import TaskModule

logger = get_logger(__name__)


def check_made(
    strategy: Strategy,
    task: TaskModule,
    *,
    optimizers: tuple[Any, Any],
    optimizer_cls_and_kwargs: Any,
    is_overridden: Callable[[str], bool],
) -> None:
    """Raise where the strategy's config makes the optimizer or the schedule, and somebody else does too.

    Args:
        strategy: Its config may make them.
        task: May make its own.
        optimizers: What the Trainer has.
        optimizer_cls_and_kwargs: What the Trainer was given.
        is_overridden: Tells whether the user's class has a hook of its own.
    """
    given: dict[str, dict[str, Any]] = {
        "optimizer": {
            "optimizers[0]": optimizers[0],
            "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
            f"{type(task).__name__}.configure_optimizers": (
                type(task).configure_optimizers is not TaskModule.configure_optimizers or None
            ),
            "an override of create_optimizer": is_overridden("create_optimizer") or None,
            # It drives an optimizer that does not exist yet.
            "optimizers[1]": optimizers[1],
        },
        "scheduler": {
            "optimizers[1]": optimizers[1],
            "an override of create_scheduler": is_overridden("create_scheduler") or None,
        },
    }
    for part in sorted(strategy.makes):
        others = [name for name, value in given[part].items() if value is not None]
        if others:
            raise ConfigError(
                f"The config of strategy={strategy.name!r} has {'an' if part[0] == 'o' else 'a'} {part}.",
                f"{', '.join(others)} would make one too, or drive another.",
                "Keep one of the two.",
            )


def is_taken(strategy: Strategy, model: nn.Module) -> bool:
    """Tell, with a warning, whether an earlier run's optimizer and schedule went into an engine that is gone.

    Args:
        strategy: Of that run and of the next one.
        model: As the earlier run left it wrapped.
    """
    has_engine = strategy.unwrap(model) is not model
    if Owns.STEP in strategy.owns and has_engine:
        logger.warning("strategy=%r starts this run with a new optimizer and a new schedule.", strategy.name)
    return Owns.STEP in strategy.owns and has_engine
