"""The loss of an evaluation is the mean over the items that its losses are means over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hftrain.task.items import KINDS, LABELS, OWN_ITEMS, SAMPLES, SHIFTED, SUM
from hftrain.task.model_task import ModelTask
from hftrain.trainer.loss_kinds import (
    COUNTED,
    ITEMS,
    MICRO_BATCH_MEAN,
    TRUSTED,
    WEIGHTED,
    LossKind,
    LossRule,
    row_sizes,
)
from hftrain.trainer.loss_normalization import LossShares


class EvaluationMean:
    """Weigh the losses of one evaluation of a plain model, by the rule of the training, which is not affected.

    The sums of all kinds of mean are kept until the end, when the processes agree on what the losses are. A loss that
    is divided by the item count that it was given is a mean over what that counts. A loss of no known kind is weighted
    by samples, as transformers does.
    """

    def __init__(self, task: ModelTask, shares: LossShares) -> None:
        self._task, self._shares, hooks = task, shares, shares.hooks
        self._rule = LossRule(hooks, task, shares.rule.strategy, shares.rule.watch)
        self._is_known, self._sizes = False, set[Any]()
        # The numbers of items in the current batch, if it is looked at.
        self._counts: Mapping[str, Any] = {}
        # The item count that the loss of the current batch was given, and the items that it counts.
        self._given, self._counted_items = None, SHIFTED if hooks.shifts_labels else LABELS
        declared, self.kinds = self._rule.kind, tuple[str, ...](KINDS)
        if declared is ITEMS:
            self.kinds = (task.count_rule if isinstance(task.count_rule, str) else OWN_ITEMS,)
        elif declared is not None and (declared == MICRO_BATCH_MEAN or declared.what in KINDS):
            self.kinds = (SAMPLES if declared == MICRO_BATCH_MEAN else declared.what,)

    def open(self, batch: Any) -> None:
        """Start to observe the loss of a batch, if it can tell more than is known."""
        is_looking = not self._rule.is_settled
        if is_looking:
            sizes = row_sizes(self._task.label_tensor(batch))
            is_new = not self._is_known or any(each.what == WEIGHTED for each in self._rule.candidates)
            is_looking, self._sizes = is_new or len(sizes) > 1 or not sizes <= self._sizes, self._sizes | sizes
        self._counts = {kind: self._task.count_as(kind, batch, unknown=1) for kind in KINDS} if is_looking else {}
        if is_looking and self._rule.watch is not None:
            self._rule.watch.open(batch)

    def see(self, loss: torch.Tensor | None, count: Any) -> None:
        """Recognise what a batch's loss is a mean over, by the item count that it was given."""
        self._given, watch = count, self._rule.watch
        if self._counts and watch is not None:
            found = None if loss is None else watch.recognise(loss, self._counts, count)
            watch.close()
            self._is_known |= found is not None
            self._rule.narrow(found)

    def _items_of(self, kind: LossKind) -> str | None:
        """Return the items that a loss of a kind is a mean over, None if they are unknown."""
        hooks = self._shares.hooks
        if kind.what == COUNTED or (kind.what == TRUSTED and (hooks.is_declared or hooks.is_trusted)):
            return self._counted_items
        return kind.what if kind.what in KINDS else None

    def weights(self, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        """Return, for each of `kinds`, the weight of a batch's loss in the total loss, and its number of items."""
        if self.kinds == (OWN_ITEMS,):
            count = self._task.count_items(batch)
            return {OWN_ITEMS: (count, count)}
        unknown = 1 if self._shares.hooks.overrides_loss else None
        counts: dict[str, Any] = {kind: self._task.count_as(kind, batch, unknown=unknown) for kind in self.kinds}
        if self._given is not None and len(self.kinds) > 1:
            counts[self._counted_items] = self._given
        num_samples = self._task.count_as(SAMPLES, batch, unknown=1)
        return {kind: (count, num_samples if kind == SUM else count) for kind, count in counts.items()}

    def choose(self, means: Mapping[str, float]) -> float | None:
        """Return the mean loss, the same in every process, None without items; collective.

        Args:
            means: The mean loss by kind: if the possible ones are equal, it does not matter which it is.
        """
        if len(self.kinds) == 1 or not means:
            return means.get(self.kinds[0])
        rule, trained, hooks = self._rule, self._shares.rule, self._shares.hooks
        # 1. Exclude on every process what a batch of any has excluded.
        rule.agree(set(rule.candidates) if self._is_known else None)
        # 2. Of the items that are left, those that the losses of the training can be means over come before others.
        possible = [items for items in map(self._items_of, rule.candidates) if items is not None]
        possible = [items for items in possible if items in map(self._items_of, trained.candidates)] or possible
        # 3. Choose: the count's items if a model that is trusted to divide by it did, else the likeliest, else samples.
        is_trusted = hooks.is_trusted and any(each.what == COUNTED for each in rule.candidates)
        chosen = self._counted_items if is_trusted else [*possible, SAMPLES][0]
        if chosen not in means:
            return None
        # 4. Warn if it matters; of a loss of no known kind, if samples and labels weight batches differently.
        others = [means[items] for items in possible or [LABELS] if items in means and math.isfinite(means[items])]
        if not is_trusted and not all(math.isclose(each, means[chosen], rel_tol=1e-6) for each in others):
            by = chosen.replace("_", " ")
            treatment = f"eval_loss weights batches by their {by}, so it can depend on the batch size"
            trained.warn(treatment, is_ambiguous=bool(possible))
        # 5. Code that undoes the mean over ranks has multiplied the loss by their number.
        kind = next((each for each in rule.candidates if self._items_of(each) == chosen), rule.kind)
        return means[chosen] / (self._shares.num_counted_ranks if kind is not None and kind.times_ranks else 1)
