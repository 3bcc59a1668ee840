"""Where a run is, in words, for whoever has to find out why it does not go on."""

from __future__ import annotations

from hftrain.strategies.base import Strategy

_STAGES = {"eval": "evaluate", "predict": "predict"}


def whereabouts(*, is_idle: bool, stage: str, step: int, phase: str | None) -> str:
    """Return what a Trainer does now, such as ``"train step 12"`` or ``"save checkpoint-20"``; from any thread."""
    if is_idle:
        return "between training and evaluations"
    return phase or _STAGES.get(stage) or f"train step {step + 1}"


def report_late_ranks(strategy: Strategy, error: Exception) -> None:
    """Raise `StrategyError` in place of an error that says no more than that a collective's time was up.

    Raises:
        StrategyError: It names what this process did, the ranks that did not come, and where they were.
    """
    timeout = getattr(strategy, "timeout", None)
    late = strategy.watch.late(error, timeout_s=timeout.total_seconds()) if strategy.watch and timeout else None
    if late is not None:
        raise late from error
