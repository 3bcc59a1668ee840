"""Metrics computed batch by batch: `compute_metrics` is called with each batch's tensors and keeps its own sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from hftrain.core.errors import TaskError
from hftrain.core.log import warn_once
from hftrain.core.notes import add_note, describe
from hftrain.core.tree import detach, pytree, tensors_of
from hftrain.core.types import EvalPrediction
from hftrain.extras.predictions.gather import RowCollector, as_tensors
from hftrain.strategies.base import Ranks


@dataclass(eq=False)
class BatchMetrics:
    """Call the user's function with each batch's tensors; with several ranks, join one batch of each rank per call.

    Args:
        compute: ``f(EvalPrediction, compute_result=...)``.
        takes_objects: Also pass values that are not tensors.
        finish_outputs: Applied to the joined outputs.
    """

    compute: Callable[..., Mapping[str, Any] | None]
    group: Ranks
    takes_objects: bool = False
    finish_outputs: Callable[[Any], Any] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def add(self, parts: Mapping[str, Any], *, is_last: bool) -> None:
        """Call the function with one turn's outputs, labels, inputs and losses, if the first two exist. Collective.

        Args:
            parts: The values of this rank's batch by name; empty if it has none.
            is_last: No rank has a further batch.

        Raises:
            TaskError: The function did not return metrics, or the ranks' batches cannot be joined.
        """
        values: Any = None
        if parts.get("outputs") is not None and parts.get("labels") is not None:
            values = detach(as_tensors(parts, takes_objects=self.takes_objects))
        if self.group.world_size > 1:
            values = self._join_ranks(values)
        if values is not None:
            if self.finish_outputs is not None:
                values["outputs"] = self.finish_outputs(values["outputs"])
            prediction = EvalPrediction(values.pop("outputs"), values.pop("labels"), **values)
            self.metrics = call_metrics(self.compute, prediction, compute_result=is_last)

    def _join_ranks(self, values: Any) -> Any:
        """Return the joined batches of all ranks on this rank's device; None if there are none. Collective."""
        # NumPy arrays lack some dtypes of tensors.
        names = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors_of(values)]
        dtypes: Iterator[str] = iter(next(filter(None, self.group.gather_object(names)), []))
        rows = RowCollector(takes_objects=self.takes_objects)
        rows.add(values)

        def as_sent(array: Any) -> Any:
            if isinstance(array, numpy.ndarray):
                return torch.from_numpy(array).to(self.group.device, getattr(torch, next(dtypes)))
            return array

        joined = rows.joined(self.group, is_interleaved=False)
        return pytree.tree_map(as_sent, joined, is_leaf=lambda leaf: isinstance(leaf, list))


def call_metrics(function: Callable[..., Any], prediction: EvalPrediction, **options: Any) -> Mapping[str, Any]:
    """Return the result of `compute_metrics`; None means no metrics, with a warning.

    Raises:
        TaskError: The result is neither a mapping with text keys nor None.
    """
    try:
        metrics = function(prediction, **options)
    except Exception as error:
        parts = [f"prediction.{name} {describe(getattr(prediction, name))}" for name in ("predictions", "label_ids")]
        kind = "arrays" if isinstance(prediction.label_ids, numpy.ndarray) else "values"
        add_note(error, f"Raised in compute_metrics(prediction), with the {kind} {' and '.join(parts)}.")
        raise
    if metrics is None:
        if options.get("compute_result", True):
            warn_once("compute_metrics returned None, so there are no metrics. Return a dict of numbers by name.")
        return {}
    if isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics):
        return metrics
    keys = f" with the keys {', '.join(map(repr, metrics))}" if isinstance(metrics, Mapping) else ""
    reason = f"it is a {type(metrics).__name__}{keys}."
    raise TaskError("Cannot use what compute_metrics returned:", reason, "Return a dict of numbers by name.")
