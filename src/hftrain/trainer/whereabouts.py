"""Where a run is, in words, for whoever has to find out why it does not go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

_STAGES = {"eval": "evaluate", "predict": "predict"}


def whereabouts(trainer: Trainer) -> str:
    """Return what a Trainer does now, such as ``"train step 12"`` or ``"save checkpoint-20"``; from any thread."""
    session = trainer._session
    if trainer._depth == 0:
        return "between training and evaluations"
    if session is not None and session.phase is not None:
        return session.phase
    return _STAGES.get(trainer._stage) or f"train step {trainer.state.global_step + 1}"


def report_late_ranks(trainer: Trainer, error: Exception) -> None:
    """Raise `StrategyError` in place of an error that says no more than that a collective's time was up.

    Raises:
        StrategyError: It names what this process did, the ranks that did not come, and where they were.
    """
    strategy = trainer.strategy
    timeout = getattr(strategy, "timeout", None)
    late = strategy.watch.late(error, timeout_s=timeout.total_seconds()) if strategy.watch and timeout else None
    if late is not None:
        raise late from error
