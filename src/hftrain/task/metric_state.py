"""What metrics have gathered since their last reset, so that a checkpoint within a logging window loses nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hftrain.core.tree import map_tensors


def metric_states(metrics: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the states of torchmetrics and of collections of them, as tensors and plain numbers.

    Those whose state cannot be told in full (wrappers around other metrics, classes of another kind) are left out.

    Args:
        metrics: By name.
    """
    return {
        name: [{"state": part.metric_state, "num_updates": part.update_count} for part in parts]
        for name, metric in metrics.items()
        if (parts := _parts(metric)) is not None
    }


def restore_metric_states(metrics: Mapping[str, Any], states: Mapping[str, Any], *, device: torch.device) -> list[str]:
    """Put states back; mutates the metrics.

    Args:
        metrics: By name.
        states: What `metric_states` returned.
        device: Where the metrics are.

    Returns:
        The names of metrics for which there is no state that fits.
    """
    unknown = []
    for name, metric in metrics.items():
        parts, saved = _parts(metric) or [], states.get(name, [])
        if not parts or [_kinds(part.metric_state) for part in parts] != [_kinds(item["state"]) for item in saved]:
            unknown.append(name)
            continue
        metric.reset()
        for part, item in zip(parts, saved, strict=True):
            # Copies: members of a collection share their tensors, and each will add to its own at first.
            values = map_tensors(item["state"], lambda tensor: tensor.to(device, copy=True))
            # torchmetrics has no public way to say that the state is more than a default.
            vars(part).update(values, _update_count=item["num_updates"])
    return unknown


def _kinds(state: Mapping[str, Any]) -> dict[str, bool]:
    return {name: isinstance(value, torch.Tensor) for name, value in state.items()}


def _parts(metric: Any) -> list[Any] | None:
    """Return the torchmetrics in a metric or collection, None if they are not all there is to know."""
    if isinstance(metric, nn.ModuleDict):
        # Going through the items brings members up to date that a group leader gathers for.
        members = [_parts(member) for _, member in metric.items()]
        return None if None in members else [part for parts in members for part in parts or ()]
    is_plain = hasattr(metric, "metric_state") and not any(
        hasattr(module, "metric_state") for module in metric.modules() if module is not metric
    )
    return [metric] if is_plain else None
