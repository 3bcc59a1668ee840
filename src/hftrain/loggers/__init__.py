"""Experiment trackers: one per file, each told of a run and then of its metrics."""

from __future__ import annotations

from hftrain.loggers.base import Logger, RunFacts, numbers_of, regroup
from hftrain.loggers.registry import available_loggers, create_logger, loggers

__all__ = ["Logger", "RunFacts", "available_loggers", "create_logger", "loggers", "numbers_of", "regroup"]
