"""Strategies whose engine makes the optimizer or the schedule, or takes them over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hftrain.core.errors import ConfigError, explain
from hftrain.core.log import get_logger
from hftrain.core.types import Owns
from hftrain.task.module import TaskModule

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

logger = get_logger(__name__)


def check_made(trainer: Trainer) -> None:
    """Raise where the strategy's config makes the optimizer or the schedule, and somebody else does too."""
    makes, task = trainer.strategy.makes, trainer.task
    given: dict[str, dict[str, Any]] = {
        "optimizer": {
            "optimizers[0]": trainer.optimizer,
            "optimizer_cls_and_kwargs": trainer.optimizer_cls_and_kwargs,
            f"{type(task).__name__}.configure_optimizers": (
                type(task).configure_optimizers is not TaskModule.configure_optimizers or None
            ),
            "an override of create_optimizer": trainer._is_overridden("create_optimizer") or None,
            # It drives an optimizer that does not exist yet.
            "optimizers[1]": trainer.lr_scheduler,
        },
        "scheduler": {
            "optimizers[1]": trainer.lr_scheduler,
            "an override of create_scheduler": trainer._is_overridden("create_scheduler") or None,
        },
    }
    for part in sorted(makes):
        others = [name for name, value in given[part].items() if value is not None]
        if others:
            raise ConfigError(
                explain(
                    f"The config of strategy={trainer.strategy.name!r} has {'an' if part[0] == 'o' else 'a'} {part}.",
                    f"{', '.join(others)} would make one too, or drive another.",
                    "Keep one of the two.",
                )
            )


def forget_taken(trainer: Trainer) -> None:
    """Forget the optimizer and the schedule of an earlier run, which went into an engine that is gone."""
    strategy = trainer.strategy
    has_engine = strategy.unwrap(trainer.model_wrapped) is not trainer.model_wrapped
    if Owns.STEP in strategy.owns and has_engine:
        logger.warning("strategy=%r starts this run with a new optimizer and a new schedule.", strategy.name)
        trainer.optimizer = trainer.lr_scheduler = None
