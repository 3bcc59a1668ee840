"""What is loaded only when it is asked for: extras, which the core reaches by name, and optional packages."""

from __future__ import annotations

import importlib
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
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


def is_available(requirement: str) -> bool:
    """Return whether an installed package satisfies `requirement` (``"deepspeed>=0.16"``), without importing it."""
    return bool(_cache(requirement))


def require(requirement: str, *, feature: str, extra: str | None = None) -> None:
    """Raise unless an optional package is installed in a version that the requirement allows.

    Args:
        feature: The setting that needs it, as the user wrote it (``"strategy='deepspeed'"``).
    """
    if not _cache(requirement):
        package = re.split(r"[^\w.-]", requirement)[0]
        release = _version(package)
        target = f"hftrain[{extra}]" if extra else requirement
        state = "which is not installed" if release is None else f"and {package} {release} is installed"
        raise MissingDependencyError(
            f"Cannot use {feature}:", f"it needs {requirement}, {state}.", f"Run: pip install '{target}'"
        )


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of the given packages, without those that are not installed."""
    return {package: found for package in packages if (found := _version(package)) is not None}


@cache  # read at each save, and parsing the package's metadata is slow
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cache(requirement: str) -> Any:
    # Imported here because the requirement parser is slow to import.
    from lightning_utilities.core.imports import RequirementCache

    return RequirementCache(requirement)
