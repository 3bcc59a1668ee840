"""The state of metrics since their last reset: computed for a report, or saved in a checkpoint within a window."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import TaskError
from hftrain.core.log import warn_once
from hftrain.core.tree import map_tensors


def checked_metrics(task: Any, stage: str) -> Mapping[str, Any]:
    """Return the metrics of a task.

    Raises:
        TaskError: They are not a mapping of names to metrics.
    """
    metrics = task.metrics(stage)
    problem = f"Cannot use what {type(task).__name__}.metrics({stage!r}) returned:"
    if not isinstance(metrics, Mapping):
        raise TaskError(problem, f"it is a {type(metrics).__name__}.", "Return a dict of metrics by name.")
    for name, metric in metrics.items():
        if not all(hasattr(metric, method) for method in ("update", "compute", "reset")):
            raise TaskError(
                problem,
                f"{name!r} is a {type(metric).__name__}, without update, compute and reset.",
                "Return torchmetrics objects; numbers belong in StepOutput(logs=...).",
            )
    return metrics


def read_metrics(metrics: Mapping[str, Any], *, stage: str, ranks: Any) -> dict[str, Any]:
    """Compute metrics, and return their values; collective if there are any.

    A metric that no rank has updated since its last reset is left out, with one warning.

    Args:
        metrics: By name; torchmetrics synchronises ranks in `compute`.
        ranks: The processes that read different samples: `Strategy.data`.
    """
    values: dict[str, Any] = {}
    names = [name for name in metrics if _is_updated(metrics[name])]
    updated = set().union(*ranks.gather_object(names)) if metrics else ()
    for name, metric in metrics.items():
        if name not in updated:
            warn_once(
                f"The metric {name!r} is left out: nothing has updated it. Call its update() in {stage}, or leave it "
                "out of the task's metrics()."
            )
            continue
        with warnings.catch_warnings():
            # A rank that had no batch has not updated it, but must take part.
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
            with _synchronising_within(ranks.group, metric):
                value = metric.compute()
        values.update(value if isinstance(value, Mapping) else {name: value})
    return values


def reset(metrics: Mapping[str, Any]) -> None:
    """Reset metrics."""
    for metric in metrics.values():
        metric.reset()


@contextmanager
def _synchronising_within(group: Any, metric: Any) -> Iterator[None]:
    """Make a metric, and those inside a wrapper, synchronise within a process group, unless they have one."""
    parts = [part for part in _parts_of(metric) if group is not None and getattr(part, "process_group", group) is None]
    for part in parts:
        part.process_group = group
    try:
        yield
    finally:
        for part in parts:
            part.process_group = None


def candidate_metrics(task: nn.Module) -> dict[str, Any]:
    """Return what could be a metric among the modules of a task, and in its plain lists, tuples and dicts."""
    candidates = dict(task.named_modules())
    for name, value in vars(task).items():
        members: Any = enumerate(value) if isinstance(value, (list, tuple)) else ()
        members = value.items() if isinstance(value, dict) else members
        candidates |= {f"{name}[{key!r}]": member for key, member in members if not name.startswith("_")}
    return {name: candidate for name, candidate in candidates.items() if hasattr(candidate, "compute")}


def warn_of_unread(candidates: Mapping[str, Any], metrics: Mapping[str, Any], message: str) -> None:
    """Warn once, with a message about their names, of metrics that were updated but are not among those reported."""
    reported_ids = {id(part) for metric in metrics.values() for part in _parts_of(metric)}
    names = []
    for name, metric in candidates.items():
        parts = [part for part in _parts_of(metric) if id(part) not in reported_ids]
        # A metric whose value was read, of all batches or of one (torchmetrics' `forward`), is reported by the user.
        is_read = any(
            getattr(part, value, None) is not None for part in parts for value in ("_computed", "_forward_cache")
        )
        if not is_read and any(getattr(part, "update_called", None) is True for part in parts):
            reported_ids |= set(map(id, parts))
            names.append(name)
    if names:
        warn_once(f"The metrics {', '.join(names)} {message}")


def _parts_of(metric: Any) -> list[Any]:
    return list(metric.modules()) if isinstance(metric, nn.Module) else [metric]


def _is_updated(metric: Any) -> bool:
    """Return whether a metric, or one inside a wrapper, was updated since its last reset; True if that is unknown."""
    flags = [part.update_called for part in _parts_of(metric) if hasattr(part, "update_called")]
    return any(flags) or not flags


def metric_states(metrics: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the states of torchmetrics and of collections of them, as tensors and plain numbers.

    Metrics whose whole state cannot be read (wrappers around other metrics, other classes) are left out.
    """
    return {
        name: [{"state": part.metric_state, "num_updates": part.update_count} for part in parts]
        for name, metric in metrics.items()
        if (parts := _whole_parts(metric)) is not None
    }


def restore_metric_states(metrics: Mapping[str, Any], states: Mapping[str, Any], *, device: torch.device) -> list[str]:
    """Restore states; mutates the metrics.

    Returns:
        The names of metrics without a matching state.
    """
    unmatched = []
    for name, metric in metrics.items():
        parts, entries = _whole_parts(metric) or [], states.get(name, [])
        if not parts or [_kinds(part.metric_state) for part in parts] != [_kinds(entry["state"]) for entry in entries]:
            unmatched.append(name)
            continue
        metric.reset()
        for part, entry in zip(parts, entries, strict=True):
            # Copies: the saved members of a collection share tensors, but each restored one must own its state.
            values = map_tensors(entry["state"], lambda tensor: tensor.to(device, copy=True))
            # torchmetrics has no public way to mark a state as updated.
            vars(part).update(values, _update_count=entry["num_updates"])
    return unmatched


def _kinds(state: Mapping[str, Any]) -> dict[str, bool]:
    return {name: isinstance(value, torch.Tensor) for name, value in state.items()}


def _whole_parts(metric: Any) -> list[Any] | None:
    """Return the torchmetrics in a metric or collection, None if they do not hold its whole state."""
    if isinstance(metric, nn.ModuleDict):
        # Iterating over the items copies the state of each compute group's leader to its members.
        members = [_whole_parts(member) for _, member in metric.items()]
        return None if None in members else [part for parts in members for part in parts or ()]
    is_plain = hasattr(metric, "metric_state") and not any(
        hasattr(module, "metric_state") for module in metric.modules() if module is not metric
    )
    return [metric] if is_plain else None
