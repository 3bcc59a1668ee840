"""The loss of an evaluation is the mean over the items that its losses are proved to be means over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hftrain.strategies.base import Strategy
from hftrain.task.items import KINDS, LABELS, SAMPLES, SHIFTED, SUM
from hftrain.task.model_task import ModelTask
from hftrain.trainer.loss_finding import ALIKE, ITEMS, declared
from hftrain.trainer.loss_normalization import LossShares
from hftrain.trainer.proofs import COUNTED, PLAIN, findings, label_numbers

_ROWS = (*KINDS, COUNTED)


class EvaluationMean:
    """Weigh the losses of one evaluation of a plain model.

    The sums of all kinds of mean are kept, and batches that are looked at ever more rarely prove which of them is the
    mean. If none is, batches are weighted by samples, as transformers does, or by the count that the model has taken.

    Args:
        shares: Those of the training, which know what is declared and count items; the training is not affected.
    """

    def __init__(self, task: ModelTask, strategy: Strategy, shares: LossShares) -> None:
        self._task, self._strategy, self._shares = task, strategy, shares
        self._num_batches, self._numbers = 0, set[int]()
        # The numbers of items in the batch that is looked at.
        self._batch: Mapping[str, Any] | None = None
        self._left: set[str] | None = None
        hooks, said = shares.hooks, declared(shares.hooks, task)
        # Loss, once: divided by the count that was passed to it, and what is to be undone of the factor of ranks.
        self._is_counted, self._scale = hooks.is_plain and bool(hooks.accepts_count or task.label_smoothing), 1.0
        self.kinds: tuple[str, ...] = _ROWS
        if said is ITEMS:
            self.kinds = (task.count_rule if isinstance(task.count_rule, str) else "",)
        elif said is ALIKE:
            self.kinds = (SAMPLES,)

    def open(self, batch: Any) -> None:
        """Start to observe the loss of a batch, if it is looked at."""
        self._num_batches += 1
        watch, self._batch = self._shares.found.watch, None
        if self.kinds is not _ROWS or self._num_batches & (self._num_batches - 1) or watch is None:
            return
        self._batch = {kind: self._task.count_as(kind, batch) for kind in KINDS}
        self._numbers |= label_numbers(self._task.label_tensor(batch))
        watch.open(batch)

    def see(self, loss: torch.Tensor | None, count: Any) -> torch.Tensor | None:
        """Return the batch's loss without a factor of ranks that its code applied; prove what it is a mean over."""
        if self._batch is not None:
            self._look(loss, self._batch, count)
        return loss if loss is None or self._scale == 1 else loss * self._scale

    def _look(self, loss: torch.Tensor | None, counts: Mapping[str, Any], count: Any) -> None:
        watch, num_ranks = self._shares.found.watch, self._shares.num_ranks
        assert watch is not None
        calls = watch.close()
        if loss is None:
            return
        total = None if count is None else float(count)
        scales = self._shares.found.scales(has_count=count is not None)
        found = findings(loss, calls, counts=counts, total=total, scales=scales)
        if found is None:
            return
        plain = {finding for finding, _ in found if finding.what in (*KINDS, PLAIN)}
        counted = {(finding.is_scaled, kind) for finding, kind in found if finding.what == COUNTED}
        left = {finding.what for finding in plain} - {PLAIN}
        if plain:
            self._is_counted = False
            self._scale = 1 / num_ranks if all(finding.is_scaled for finding in plain) else 1.0
        elif counted:
            # The items are known if any of what it can be names them.
            self._is_counted, left = True, {kind for _, kind in counted if kind}
            self._scale = 1.0 if num_ranks == 1 or any(is_scaled for is_scaled, _ in counted) else float(num_ranks)
        self._left = left if self._left is None else self._left & left

    def weights(self, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        """Return, for each of `kinds`, the weight of a batch's loss in the total loss, and its number of items."""
        task = self._task
        if self.kinds == ("",):
            return {"": (task.count_items(batch),) * 2}
        total: Any = self._shares.count_for_evaluation(batch) if self._is_counted else None
        given = None if total is None else total / self._shares.num_ranks
        found: dict[str, tuple[Any, Any]] = {}
        for kind in self.kinds:
            count: Any = given if kind == COUNTED and given is not None else task.count_as(kind, batch)
            weight = given if given is not None and kind in (LABELS, SHIFTED) else count
            found[kind] = (weight, count if kind != SUM else task.count_as(SAMPLES, batch))
        return found

    def choose(self) -> str:
        """Return the kind of mean, the same in every process; collective."""
        if self.kinds is not _ROWS:
            return self.kinds[0]
        left = set(KINDS) if self._left is None else self._left
        flags = [*(kind not in left for kind in KINDS), self._left is not None, self._is_counted]
        if self._strategy.world_size > 1:
            told = torch.tensor([int(flag) for flag in flags], device=self._strategy.device)
            flags = self._strategy.reduce(told, op="max").tolist()
        *missing, is_told, is_counted = flags
        kinds = [kind for kind, is_gone in zip(KINDS, missing, strict=True) if not is_gone] if is_told else []
        if len(self._numbers) > 1:
            self._shares.found.warn_of_evaluation(kinds, is_counted=bool(is_counted))
        return kinds[0] if kinds else COUNTED if is_counted else SAMPLES
