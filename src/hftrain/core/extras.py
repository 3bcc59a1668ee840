"""Extras: features in folders of their own, which the core reaches by name and loads when they are asked for."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from hftrain.core.errors import MissingDependencyError

# Where those are that are not the module of their name. Deleting an extra, and its line here, leaves the rest as it is.
_HOMES = {
    "deepspeed": "engine_settings.deepspeed",
    "flight_log": "flight.ledger",
    "fsdp": "engine_settings.fsdp",
    "hub": "hub.trainer_hub",
    "jit_mode_eval": "tracing",
    "own_optimizers": "own_optimizers.reading",
    "packing": "packing.checks",
    "past_index": "recurrence",
    "prediction_metrics": "predictions.batch_metrics",
    "predictions": "predictions.gather",
    "profiler": "profiling.profiling",
    "progress": "progress.bars",
    "rehearsal": "rehearsal.rehearsal",
    "remote": "remote.folders",
    "remote_checkpoints": "remote.checkpoints",
    "search": "search.trials",
    "smaller_batches": "batch_size.micro_batches",
    "summary": "progress.summary",
    "trackers": "trackers.choice",
    "tuner": "rehearsal.tuning",
    "underflow_overflow": "overflow",
    "xla": "engine_settings.xla",
    "xla_metrics": "engine_settings.xla",
}


def extra(name: str) -> Any:
    """Return the module of an extra: one that hftrain has, or another package's entry point in ``hftrain.extras``.

    Raises:
        MissingDependencyError: There is no such extra.
    """
    home = f"hftrain.extras.{_HOMES.get(name, name)}"
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if not f"{home}.".startswith(f"{error.name}."):  # what the extra itself imports is missing
            raise
    for point in entry_points(group="hftrain.extras", name=name):
        return point.load()
    raise MissingDependencyError(
        f"Cannot use the extra {name!r}.", "It was taken out of this installation.", "Install hftrain again."
    )
