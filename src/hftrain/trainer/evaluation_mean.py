"""The loss of an evaluation is the mean over the items that its losses are means over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hftrain.task.items import KINDS, LABELS, SAMPLES, SHIFTED, SUM
from hftrain.task.model_task import ModelTask
from hftrain.trainer.loss_kinds import COUNTED, PLAIN, TRUSTED, WEIGHTED, LossKind, is_ragged, recognise
from hftrain.trainer.loss_normalization import ALIKE, ITEMS, LossShares


class EvaluationMean:
    """Weigh the losses of one evaluation of a plain model, by the rule of its training.

    The sums of all kinds of mean are kept until the end, when the processes agree on what the losses are. A loss that
    is divided by the item count that it was given is a mean over what that counts. A loss of no known kind is weighted
    by samples, as transformers does.

    Args:
        shares: Those of the training, which know what is declared and count items; the training is not affected.
    """

    def __init__(self, task: ModelTask, shares: LossShares) -> None:
        self._task, self._shares, self._rule = task, shares, shares.rule
        hooks, self.kinds = shares.hooks, KINDS
        said = hooks.declared(task)
        if said is ITEMS:
            self.kinds = (task.count_rule if isinstance(task.count_rule, str) else "",)
        elif said is not None and (said == ALIKE or said.what in KINDS):
            self.kinds = (SAMPLES if said == ALIKE else said.what,)
        self._counted_items = SHIFTED if hooks.shifts_labels else LABELS
        self._left: set[str] | None = None
        self._is_looking = False
        # The item count that the loss of the current batch was given, and what undoes a factor of ranks in it.
        self._given, self._factor = None, 1.0

    def open(self, batch: Any) -> None:
        """Start to observe the loss of a batch, if it can tell more than is known."""
        left, labels = self._left, self._task.label_tensor(batch)
        is_open = len(self.kinds) > 1 and (left is None or len(left) > 1)
        self._is_looking = is_open and (left is None or WEIGHTED in left or is_ragged(labels))
        if self._is_looking and self._rule.watch is not None:
            self._rule.watch.open(batch)

    def see(self, loss: torch.Tensor | None, count: Any, batch: Any) -> torch.Tensor | None:
        """Return the batch's loss without a factor of ranks that its code applied; recognise what it is a mean over."""
        self._given = None if count is None else count / self._shares.num_ranks
        if self._is_looking and self._rule.watch is not None:
            calls = self._rule.watch.close()
            counts = {kind: self._task.count_as(kind, batch, unknown=1) for kind in KINDS}
            found = None if loss is None else recognise(loss, calls, counts, count, self._shares.num_ranks)
            if found is not None:
                self._narrow(found)
        return loss if loss is None or self._factor == 1 else loss * self._factor

    def _narrow(self, found: set[LossKind]) -> None:
        hooks = self._shares.hooks
        trusted = (COUNTED, TRUSTED) if hooks.is_declared or hooks.is_trusted else (COUNTED,)
        counted = {each for each in found if each.what in trusted}
        plain = {each for each in found if each.what in (*KINDS, WEIGHTED, PLAIN)}
        kinds = {each.what for each in plain if each.what != PLAIN} | ({self._counted_items} if counted else set())
        self._left = kinds if self._left is None else self._left & kinds
        if found and not any(each.is_scaled == (each in counted) for each in found):
            self._factor = float(self._shares.num_ranks) if counted else 1 / self._shares.num_ranks

    def weights(self, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        """Return, for each of `kinds`, the weight of a batch's loss in the total loss, and its number of items."""
        if self.kinds == ("",):
            return {"": (self._task.count_items(batch),) * 2}
        unknown = 1 if self._shares.hooks.overrides_loss else None
        counts: dict[str, Any] = {kind: self._task.count_as(kind, batch, unknown=unknown) for kind in self.kinds}
        if self._given is not None and len(self.kinds) > 1:
            counts[self._counted_items] = self._given
        return {
            kind: (count, self._task.count_as(SAMPLES, batch, unknown=1) if kind == SUM else count)
            for kind, count in counts.items()
        }

    def choose(self, means: Mapping[str, float]) -> str:
        """Return the kind of mean, the same in every process; collective.

        Args:
            means: The mean loss by kind: if the possible ones are equal, it does not matter which it is.
        """
        if len(self.kinds) == 1 or not means:
            return self.kinds[0]
        left, strategy = set(KINDS) if self._left is None else self._left, self._rule.strategy
        flags = [*(kind not in left for kind in KINDS), self._left is not None]
        if strategy.world_size > 1:
            numbers = torch.tensor([int(flag) for flag in flags], device=strategy.device)
            flags = strategy.reduce(numbers, op="max").tolist()
        *missing, is_told = flags
        kinds = [kind for kind, is_gone in zip(KINDS, missing, strict=True) if not is_gone] if is_told else []
        kinds = [kind for kind in kinds if LossKind(kind) in self._rule.candidates] or kinds
        chosen = kinds[0] if kinds else SAMPLES
        if not all(math.isclose(means[kind], means[chosen], rel_tol=1e-6) for kind in kinds or (LABELS,)):
            if kinds:
                self._rule.warn_of_ambiguity(chosen)
            else:
                self._rule.warn("eval_loss weights batches by their samples, so it depends on the batch size")
        return chosen
