"""Metrics computed batch by batch: `compute_metrics` is called with each batch's tensors and adds up what it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy
import torch

from hftrain.core.errors import TaskError
from hftrain.core.tree import detach, map_tensors
from hftrain.core.types import EvalPrediction
from hftrain.loops.gather import Group, as_tensors, concatenate
from hftrain.loops.objects import decode, encode


class BatchMetrics:
    """Call the user's function with each batch's tensors; over several ranks with the batches of one turn, joined.

    Args:
        compute: ``f(EvalPrediction, compute_result=...)``.
        group: The ranks.
        takes_objects: Hand on what is no tensor, too.
        finish_outputs: Runs on a turn's outputs, joined.
    """

    def __init__(
        self,
        compute: Callable[..., Mapping[str, Any] | None],
        *,
        group: Group,
        takes_objects: bool = False,
        finish_outputs: Callable[[Any], Any] | None = None,
    ) -> None:
        self._compute = compute
        self._finish_outputs = finish_outputs
        self._group = group
        self._takes_objects = takes_objects
        self._join = partial(concatenate, takes_objects=takes_objects)
        self._is_done = False
        self._metrics: Mapping[str, Any] = {}

    def add(self, parts: Mapping[str, Any], *, is_last: bool) -> None:
        """Hand on one batch's outputs, labels, inputs and losses; without the first two, nothing. Collective.

        Args:
            parts: The batch's values by name; empty where this rank has no batch left.
            is_last: This rank has no further batch.

        Raises:
            TaskError: The function returned something else than metrics.
        """
        is_complete = parts.get("outputs") is not None and parts.get("labels") is not None
        mine = {name: self._tensors(part) for name, part in parts.items()} if is_complete else None
        self._is_done, joined = is_last, mine
        if self._group.world_size > 1:
            joined = self._over_ranks(mine, is_last=is_last)
        if joined is not None:
            if self._finish_outputs is not None:
                joined["outputs"] = self._finish_outputs(joined["outputs"])
            prediction = EvalPrediction(joined.pop("outputs"), joined.pop("labels"), **joined)
            self._metrics = checked_metrics(self._compute(prediction, compute_result=self._is_done))

    def _tensors(self, part: Any) -> Any:
        return None if part is None else detach(as_tensors(part, takes_objects=self._takes_objects))

    def _over_ranks(self, mine: dict[str, Any] | None, *, is_last: bool) -> dict[str, Any] | None:
        """Return this turn's batches of all ranks, joined, on this rank's device; None if there is none. Collective."""
        dtypes: list[str] = []
        map_tensors(mine, lambda tensor: dtypes.append(str(tensor.dtype)))
        arrays = None if mine is None else {name: self._join([part]) for name, part in mine.items()}
        turn = [decode(rank) for rank in self._group.gather_object(encode((arrays, dtypes, is_last)))]
        self._is_done = all(is_last for *_, is_last in turn)
        batches = [batch for batch, *_ in turn if batch is not None]
        if not batches:
            return None
        # Of the first that has a batch: arrays do not know every type that tensors have.
        kinds = iter(next(kinds for batch, kinds, _ in turn if batch is not None))

        def as_sent(tree: Any) -> Any:
            if isinstance(tree, numpy.ndarray):
                dtype = getattr(torch, next(kinds).removeprefix("torch."))
                return torch.from_numpy(tree).to(self._group.device, dtype)
            if isinstance(tree, dict):
                return {key: as_sent(value) for key, value in tree.items()}
            return tuple(map(as_sent, tree)) if isinstance(tree, tuple) else tree

        return {name: as_sent(self._join([batch.get(name) for batch in batches])) for name in batches[0]}

    def finish(self) -> Mapping[str, Any]:
        """Return the metrics once every rank is through its batches. Collective."""
        while not self._is_done:
            self.add({}, is_last=True)
        return self._metrics


def checked_metrics(metrics: Any) -> Mapping[str, Any]:
    """Return what `compute_metrics` gave; None counts as no metric.

    Raises:
        TaskError: It is neither a mapping nor None.
    """
    if metrics is None or isinstance(metrics, Mapping):
        return metrics or {}
    raise TaskError(
        "compute_metrics was called.",
        f"It returned a {type(metrics).__name__}.",
        "Return a dict of numbers by name.",
        returned=metrics,
    )
