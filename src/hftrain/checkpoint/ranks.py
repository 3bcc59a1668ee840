"""Per-process state, for a run that resumes with another number of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def share_out(states: Sequence[dict[str, Any]], *, rank: int) -> dict[str, Any]:
    """Return the state of one new process, from the states that the old processes saved, by rank.

    Random numbers are those of the process with the same rank, or of the last. The open logging window is merged, so
    that the next log has the same means.
    """
    own = dict(states[min(rank, len(states) - 1)])
    # The position in the process's own share of the data, which is a different share now.
    own.pop("data", None)
    losses = [state["loss_window"] for state in states if "loss_window" in state]
    if losses:
        own["loss_window"] = {**losses[0], **{name: _mean([window[name] for window in losses]) for name in _MEANS}}
    logs = [state["log_window"] for state in states if "log_window" in state]
    if logs:
        total = {part: _sum([window.get(part, {}) for window in logs]) for part in ("sums", "counts")}
        own["log_window"] = total if rank == 0 else {}
    return own


# Values of a logging window that each process has for itself, and that are averaged over processes when read.
_MEANS = ("sum", "pending", "num_finite")


def _mean(values: Sequence[Any]) -> Any:
    if values[0] is None:
        return None
    if isinstance(values[0], list):
        return [_mean(each) for each in zip(*values, strict=True)]
    return sum(torch.as_tensor(value) for value in values) / len(values)


def _sum(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: sum(part.get(name, 0) for part in parts) for name in {key: None for part in parts for key in part}}
