"""Speed metrics, and metrics as plain values."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from hftrain.core.errors import TaskError
from hftrain.core.log import warn_once
from hftrain.core.state import TrainerState


def speed_metrics(
    prefix: str,
    start_s: float,
    *,
    num_samples: int | None = None,
    num_steps: int | None = None,
    num_tokens: int | None = None,
) -> dict[str, float]:
    """Return runtime (seconds) and rates since `start_s`, a `time.perf_counter()` reading.

    Source: the documented `<prefix>_runtime`, `_samples_per_second`, `_steps_per_second`, `_tokens_per_second`.
    """
    runtime_s = time.perf_counter() - start_s
    counts = {"samples": num_samples, "steps": num_steps, "tokens": num_tokens}
    rates = {
        f"{prefix}_{name}_per_second": round(count / runtime_s, 3)
        for name, count in counts.items()
        if runtime_s > 0 and count is not None
    }
    return {f"{prefix}_runtime": round(runtime_s, 4), **rates}


def token_speed(start_time: float, num_tokens: int | None) -> dict[str, float]:
    """Return the runtime and the rate of tokens since `start_time`, a `time.time()` value."""
    return speed_metrics("train", start_time - time.time() + time.perf_counter(), num_tokens=num_tokens)


def to_plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with tensors and NumPy values converted to plain numbers and lists, ready for JSON."""
    return {str(name): _plain(value, str(name)) for name, value in metrics.items()}


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that are single real numbers, as plain ones."""
    kinds = (int, float, numpy.number, torch.Tensor)
    scalars = {
        name: value for name, value in metrics.items() if isinstance(value, kinds) and not getattr(value, "shape", ())
    }
    return {name: value for name, value in to_plain(scalars).items() if isinstance(value, (int, float))}


def with_prefix(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return metrics whose names all start with ``<prefix>_``."""
    return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in metrics.items()}


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return to_plain(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TaskError(
        f"Cannot report {name!r}:",
        f"it is a {type(value).__name__}, which no log or checkpoint can hold.",
        "Report numbers, text, or lists and dicts of them.",
        value=value,
    )


def merge_reports(*reports: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values by name; for a duplicate name, warn and keep the first value."""
    merged: dict[str, Any] = {}
    for report in reports:
        duplicates = sorted(merged.keys() & report.keys())
        if duplicates:
            warn_once(f"These numbers are left out, for their names are taken: {', '.join(duplicates)}. Rename them.")
        merged |= {name: value for name, value in report.items() if name not in merged}
    return merged


def as_entry(logs: dict[str, Any], state: TrainerState) -> dict[str, Any]:
    """Return a log entry in plain values, with the state's epoch and step, which `logs` get too; mutates `logs`.

    Warns of other values under these names.
    """
    position = {"epoch": state.epoch or 0.0, "step": state.global_step}
    merge_reports(position, {name: logs[name] for name in position if logs.get(name) not in (None, position[name])})
    logs.update({name: position[name] for name in position if name == "epoch" or name in logs})
    return {**to_plain(logs), **position}
