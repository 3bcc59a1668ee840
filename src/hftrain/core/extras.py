"""Extras: features in folders of their own, which the core reaches by name and loads when they are asked for."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from hftrain.core.errors import MissingDependencyError

# Deleting an extra's folder and its line here leaves the rest as it is.
EXTRAS = {
    "acceleration": "hftrain.extras.acceleration",
    "added_groups": "hftrain.extras.added_groups",
    "attaching": "hftrain.extras.attaching",
    "background": "hftrain.extras.background",
    "deepspeed": "hftrain.extras.engine_settings.deepspeed",
    "early_stopping": "hftrain.extras.early_stopping",
    "evaluated_weights": "hftrain.extras.evaluated_weights",
    "flight_log": "hftrain.extras.flight.ledger",
    "foreign_checkpoints": "hftrain.extras.foreign_checkpoints",
    "fsdp": "hftrain.extras.engine_settings.fsdp",
    "grouping": "hftrain.extras.grouping",
    "health": "hftrain.extras.health",
    "hub": "hftrain.extras.hub.trainer_hub",
    "intervals": "hftrain.extras.intervals",
    "jit_mode_eval": "hftrain.extras.tracing",
    "liger": "hftrain.extras.liger",
    "limits": "hftrain.extras.limits",
    "live_window": "hftrain.extras.live_window",
    "memory": "hftrain.extras.memory",
    "mistakes": "hftrain.extras.mistakes",
    "neftune": "hftrain.extras.neftune",
    "own_loops": "hftrain.extras.own_loops",
    "own_optimizers": "hftrain.extras.own_optimizers.reading",
    "packing": "hftrain.extras.packing.checks",
    "past_index": "hftrain.extras.recurrence",
    "prediction_metrics": "hftrain.extras.predictions.batch_metrics",
    "predictions": "hftrain.extras.predictions.gather",
    "profiler": "hftrain.extras.profiling.profiling",
    "progress": "hftrain.extras.progress.bars",
    "record": "hftrain.extras.record",
    "recompute": "hftrain.extras.recompute",
    "rehearsal": "hftrain.extras.rehearsal.rehearsal",
    "remote": "hftrain.extras.remote.folders",
    "remote_checkpoints": "hftrain.extras.remote.checkpoints",
    "reports": "hftrain.extras.reports",
    "salvage": "hftrain.extras.salvage",
    "search": "hftrain.extras.search.trials",
    "shares": "hftrain.extras.shares",
    "smaller_batches": "hftrain.extras.batch_size.micro_batches",
    "streams": "hftrain.extras.streams",
    "summary": "hftrain.extras.progress.summary",
    "trackers": "hftrain.extras.trackers.choice",
    "tuner": "hftrain.extras.rehearsal.tuning",
    "underflow_overflow": "hftrain.extras.overflow",
    "xla": "hftrain.extras.engine_settings.xla",
    "xla_metrics": "hftrain.extras.engine_settings.xla",
}


def extra(name: str) -> Any:
    """Return the module of an extra: one that hftrain has, or another package's entry point in ``hftrain.extras``.

    Raises:
        MissingDependencyError: There is no such extra.
    """
    if name in EXTRAS:
        return importlib.import_module(EXTRAS[name])
    for point in entry_points(group="hftrain.extras", name=name):
        return point.load()
    raise MissingDependencyError(
        f"Cannot use the extra {name!r}.", "It was taken out of this installation.", "Install hftrain again."
    )
