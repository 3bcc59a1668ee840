"""The documented `metrics_format`, `log_metrics` and `save_metrics`: how a run's metrics are shown and stored."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.core.metrics import to_plain


def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Format metrics for reading: memory in MB, times as h:mm:ss, operations in GF, floats rounded.

    Source: the documented `metrics_format`.
    """
    texts: dict[str, Any] = {}
    for name, value in metrics.items():
        if "_mem_" in name:
            texts[name] = f"{int(value) >> 20}MB"
        elif "_runtime" in name:
            seconds, hundredths = divmod(round(float(value) * 100), 100)
            texts[name] = f"{datetime.timedelta(seconds=seconds)}.{hundredths:02d}"
        elif name == "total_flos":
            texts[name] = f"{int(value) >> 30}GF"
        elif isinstance(value, float):
            texts[name] = round(value, 4)
        else:
            texts[name] = value
    return texts


def metrics_table(split: str, metrics: Mapping[str, Any]) -> str:
    """Return metrics as aligned lines under a title, names sorted."""
    texts = {name: str(value) for name, value in sorted(metrics_format(metrics).items())}
    name_width, value_width = max(map(len, texts), default=0), max(map(len, texts.values()), default=0)
    lines = [f"  {name:<{name_width}} = {value:>{value_width}}" for name, value in texts.items()]
    return "\n".join([f"***** {split} metrics *****", *lines])


def store_metrics(folder: Path, split: str, metrics: Mapping[str, Any], *, combined: bool) -> None:
    """Write ``<split>_results.json`` and, if `combined`, add to ``all_results.json``; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = to_plain(metrics)
    (folder / f"{split}_results.json").write_text(json.dumps(plain, indent=4, sort_keys=True) + "\n", encoding="utf-8")
    if combined:
        path = folder / "all_results.json"
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps({**stored, **plain}, indent=4, sort_keys=True) + "\n", encoding="utf-8")
