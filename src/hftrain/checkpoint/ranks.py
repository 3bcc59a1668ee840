"""What differs by process, for a run that goes on with another number of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def share_out(states: Sequence[dict[str, Any]], *, rank: int) -> dict[str, Any]:
    """Return what one of the new processes goes on with, of what each of the old ones saved, by rank.

    Random numbers are those of the process of the same number, or of the last. The open logging window is merged, so
    that the next log has the same means.
    """
    own = dict(states[min(rank, len(states) - 1)])
    # Where each process was in its own share of the data, which is another one now.
    own.pop("data", None)
    losses = [state["loss_window"] for state in states if "loss_window" in state]
    if losses:
        own["loss_window"] = {**losses[0], **{name: _mean([window[name] for window in losses]) for name in _MEANS}}
    logs = [state["log_window"] for state in states if "log_window" in state]
    if logs:
        total = {part: _sum([window.get(part, {}) for window in logs]) for part in ("sums", "counts")}
        own["log_window"] = total if rank == 0 else {}
    return own


# Of a logging window's losses: what each process has of its own, and is averaged over processes when it is read.
_MEANS = ("sum", "pending", "num_finite")


def _mean(values: Sequence[Any]) -> Any:
    if values[0] is None:
        return None
    if isinstance(values[0], list):
        return [_mean(each) for each in zip(*values, strict=True)]
    return sum(torch.as_tensor(value) for value in values) / len(values)


def _sum(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: sum(part.get(name, 0) for part in parts) for name in {key: None for part in parts for key in part}}
