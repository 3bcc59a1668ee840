"""Formatting and storing of a run's metrics."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from hftrain.core.errors import TaskError


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


def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Format metrics for reading: memory in MB, times as h:mm:ss, operations in GF, floats rounded.

    Source: the documented `metrics_format`.
    """
    shown: dict[str, Any] = {}
    for name, value in metrics.items():
        if "_mem_" in name:
            shown[name] = f"{int(value) >> 20}MB"
        elif "_runtime" in name:
            seconds, hundredths = divmod(round(float(value) * 100), 100)
            shown[name] = f"{datetime.timedelta(seconds=seconds)}.{hundredths:02d}"
        elif name == "total_flos":
            shown[name] = f"{int(value) >> 30}GF"
        elif isinstance(value, float):
            shown[name] = round(value, 4)
        else:
            shown[name] = value
    return shown


def metrics_table(split: str, metrics: Mapping[str, Any]) -> str:
    """Return metrics as aligned lines under a title, names sorted."""
    shown = {name: str(value) for name, value in sorted(metrics_format(metrics).items())}
    if not shown:
        return f"***** {split} metrics *****"
    left, right = max(map(len, shown)), max(map(len, shown.values()))
    lines = [f"  {name:<{left}} = {value:>{right}}" for name, value in shown.items()]
    return "\n".join([f"***** {split} metrics *****", *lines])


def store_metrics(folder: Path, split: str, metrics: Mapping[str, Any], *, combined: bool) -> None:
    """Write ``<split>_results.json`` and, if `combined`, add to ``all_results.json``; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = to_plain(metrics)
    (folder / f"{split}_results.json").write_text(json.dumps(plain, indent=4, sort_keys=True) + "\n", encoding="utf-8")
    if combined:
        path = folder / "all_results.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps({**known, **plain}, indent=4, sort_keys=True) + "\n", encoding="utf-8")


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
