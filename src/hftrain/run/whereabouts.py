"""A description of what a run is doing, to find out why it makes no progress."""

from __future__ import annotations

from hftrain.strategies.base import Strategy

_STAGES = {"eval": "evaluate", "predict": "predict"}


def whereabouts(*, is_idle: bool, stage: str, step: int, phase: str | None) -> str:
    """Return what a Trainer is doing, such as ``"train step 12"`` or ``"save checkpoint-20"``; from any thread."""
    if is_idle:
        return "between training and evaluations"
    return phase or _STAGES.get(stage) or f"train step {step + 1}"


def report_late_ranks(strategy: Strategy, error: Exception) -> None:
    """Raise `StrategyError` instead of an error that only says that a collective timed out.

    Raises:
        StrategyError: Says what this process did, which ranks did not arrive, and where they were.
    """
    timeout = getattr(strategy, "timeout", None)
    late = strategy.watch.late(error, timeout_s=timeout.total_seconds()) if strategy.watch and timeout else None
    if late is not None:
        raise late from error
