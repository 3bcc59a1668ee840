"""Loss normalisation: a micro-batch's loss becomes its share of the step's mean over all items.

DDP averages gradients over ranks; if items are counted over all of them, that is undone. So with R the number of ranks
that count together, or 1 if the loss was multiplied by it already, a micro-batch's loss has the weight

    items of K in the micro-batch * R / items of K in the step     for a mean over items of kind K
    R                                                              for a sum divided by the step's count of items
    1 / micro-batches of the step                                  for any other loss, as in transformers

The last one is divided by R if the loss was multiplied by it already, and shared if a micro-batch was split. A plain
sum and a mean with class weights are other losses, too. `loss_kinds` says what a loss is; `LossShares.weight` is this
rule, and `Trainer.compute_loss` multiplies a loss that it has divided by the count of all ranks by R.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import TaskError
from hftrain.core.preserve import temporarily
from hftrain.core.tree import batch_size_of
from hftrain.strategies.base import Strategy
from hftrain.task.items import LABELS, SAMPLES, SHIFTED, known_count
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule, checked_count
from hftrain.trainer.loss_kinds import (
    COUNTED,
    ITEMS,
    MEANS,
    TRUSTED,
    UNKNOWN,
    WEIGHTED,
    LossHooks,
    LossKind,
    LossRule,
    LossWatch,
)

Count = int | torch.Tensor


class Share(NamedTuple):
    """What a micro-batch holds of a step: its items by kind and, if it was split from another, its part of that."""

    items: Mapping[str, Any]
    part: float = 1


@dataclass(slots=True)
class StepItems:
    """The items of a step."""

    totals: dict[str, Any] = field(default_factory=dict)  # by kind, over all ranks if the arguments ask for it
    batches: list[Any] = field(default_factory=list)  # kept, so that no other batch gets the id of one
    shares: dict[int, Share] = field(default_factory=dict)  # by the id of the micro-batch
    told: Any = None  # the `num_items_in_batch` that models are told; None if it was not counted here


_TOLD = "told"  # in place of a kind, while it is summed with the totals


class LossShares:
    """Count the items of a step, and multiply each micro-batch's loss by its share of them.

    Attributes:
        rule: What the loss is.
        model_task: The task of a plain model; None for a task of the user's own.
        num_micro_batches: Of the current step.
        num_counted_ranks: The ranks that count items together: 1 unless `average_tokens_across_devices` is set.
        has_weighed: Whether a loss was weighted here; False if a user's step does not call the documented one.
    """

    def __init__(self, args: TrainingArguments, strategy: Strategy, task: TaskModule, hooks: LossHooks) -> None:
        self._data, self._task, self.hooks = strategy.data, task, hooks
        self._accumulates = args.gradient_accumulation_steps > 1
        self.num_micro_batches = args.gradient_accumulation_steps
        self.num_counted_ranks = strategy.data.world_size if args.average_tokens_across_devices else 1
        # A compute_loss that is copied from elsewhere multiplies by all processes, of which some share their samples.
        self._may_be_too_large = hooks.overrides_loss and self._data.world_size < strategy.world_size
        self.is_on = self._accumulates or self.num_counted_ranks > 1 or self._may_be_too_large
        self.model_task = task if isinstance(task, ModelTask) else None
        watch = None if self.model_task is None else LossWatch(self.model_task, strategy, self.num_counted_ranks)
        self.rule = LossRule(hooks, self.model_task, strategy, watch)
        self.has_weighed = self._is_paused = self._is_looking = False
        self._num_whole = 0  # samples of the batch that is split, if one is
        self._num_untold = 0  # looks that told nothing
        self._sizes: set[Any] = set()
        self._items = StepItems()  # of the current step
        self._wait: Callable[[], Any] | None = None

    def take(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Count | None]:
        """Take a step's micro-batches and count their items."""
        uncounted = self._items = StepItems()
        taken = self.hooks.get_batch_samples(epoch_iterator, num_batches, device)
        if not isinstance(taken, (tuple, list)) or len(taken) != 2 or not isinstance(taken[0], (list, tuple)):
            raise TaskError(
                "get_batch_samples was called.",
                f"It returned a {type(taken).__name__} that is not a pair of a list of batches and their item count.",
                "Return (batches, num_items_in_batch); the count may be None, and no batches end the epoch.",
            )
        batches, num_items = taken
        self.num_micro_batches = len(batches)
        if batches and self.is_on:
            if self._items is uncounted:  # the documented get_batch_samples calls `count`, an override may not
                self.count(list(batches), device)
                self._items.told = None  # the override's count is told
            if self.model_task is None and num_items is not None:
                self._items.totals = {}  # `num_items` is the total, and may be an override's
        self._is_looking = bool(batches) and self.is_on and self._must_look(num_items)
        return batches, num_items

    def _must_look(self, num_items: Count | None) -> bool:
        """Return whether the kinds that a loss can be give a micro-batch of the step different weights. Collective."""
        if self.model_task is None or self.rule.is_settled:
            return False
        shares = self._items.shares.values()
        is_same = bool(self.rule.candidates) and not any(self._differ(each, num_items) for each in shares)
        return not self.rule.strategy.all_true(is_same)

    def count(self, batches: list[Any], device: torch.device | None) -> Count | None:
        """Return the item count of a step, over all ranks if the arguments ask for it; None if unused. Collective."""
        told = self.count_to_tell(batches) if batches else None
        if not batches or not self.is_on:
            return told
        kinds = self._kinds()
        shares = {id(batch): Share(self._count_kinds(batch, kinds)) for batch in batches}
        totals = {kind: sum(shares[id(batch)].items[kind] for batch in batches) for kind in kinds}
        if told is not None:
            totals[_TOLD] = told
        if self.num_counted_ranks > 1 and totals:
            # It moves the counts to the device without waiting.
            summed, self._wait = self._data.reduce_later(
                torch.stack([torch.as_tensor(each).squeeze() for each in totals.values()])
            )
            totals = dict(zip(totals, summed, strict=True))
        told = totals.pop(_TOLD, None)
        self._items = StepItems(totals, list(batches), shares)
        if told is None:
            # Not read before the loss is weighted, so the reduction and the forward pass overlap.
            return totals[ITEMS.what] if self.model_task is None else None
        self._end_wait()
        self._items.told = known_count(told)
        # The loss of a step without labels is shown as NaN, but no 0 / 0 reaches its gradient.
        return told.clamp(min=1)  # type: ignore[no-any-return]

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None

    def count_to_tell(self, batches: list[Any]) -> Any:
        """Return this rank's `num_items_in_batch` for user code and models; None where transformers has none."""
        task, hooks = self.model_task, self.hooks
        if task is None or not (hooks.takes_count or hooks.divided_for_step):
            return None
        if hooks.uses_model_loss and (task.count_rule is not None or task.label_smoothing):
            return None  # the loss is a mean, and not told the count
        counts = [task.documented_count(batch, shifts=hooks.shifts_labels) for batch in batches]
        return None if any(count is None for count in counts) else sum(counts)

    def _kinds(self) -> tuple[str, ...]:
        kind = self.rule.kind
        if not self.rule.is_settled or (not self.rule.has_warned and (kind is None or kind.what == UNKNOWN)):
            return MEANS
        return (kind.what,) if kind is not None and kind.what in (ITEMS.what, *MEANS) else ()

    def _count_kinds(self, batch: Any, kinds: tuple[str, ...]) -> Mapping[str, Any]:
        task, model_task = self._task, self.model_task
        if kinds != (ITEMS.what,):
            if model_task is None:
                return {}
            # An override trains on batches of unknown size in transformers, too.
            unknown = None if self.hooks.uses_model_loss and self._accumulates else 1
            return {kind: known_count(model_task.count_as(kind, batch, unknown=unknown)) for kind in kinds}
        is_countable = model_task is not None or type(task).count_items is not TaskModule.count_items
        if is_countable or self._accumulates or batch_size_of(batch) is not None:
            return {ITEMS.what: known_count(checked_count(task.count_items(batch), task.count_items))}
        return {ITEMS.what: 1}  # one per batch, as DDP weights it

    def share_of(self, batch: Any) -> Share:
        """Return a micro-batch's share; one without items if a hook has put other items in it than were counted."""
        if id(batch) in self._items.shares:
            return self._items.shares[id(batch)]
        items = self._count_kinds(batch, self._kinds())
        if self._num_whole:
            return Share(items, self._num_samples(batch) / self._num_whole)
        # Equal numbers of items are taken for those of a micro-batch that a hook has copied; what is declared is sure.
        counted = self._items.shares.values()
        is_sure = self.rule.kind is ITEMS or any(items.items() <= share.items.items() for share in counted)
        return Share(items if is_sure else {})

    def split(self, batch: Any) -> None:
        """Say which batch the next micro-batches are parts of; None for none."""
        self._num_whole = 0 if batch is None else self._num_samples(batch)

    def paused(self) -> AbstractContextManager[None]:
        """Look at nothing: an attempt that may run out of memory in one process alone must not communicate."""
        return temporarily(self, _is_paused=True)

    def _num_samples(self, batch: Any) -> int:
        return (batch_size_of(batch) if self.model_task is None else self.model_task.num_samples(batch)) or 1

    def open(self, batch: Any) -> None:
        """Start to observe a loss that will be looked at."""
        if self._is_looking and not self._is_paused and self.rule.watch is not None:
            self.rule.watch.open(batch)

    def weigh(self, loss: torch.Tensor, share: Share, num_items: Count | None) -> torch.Tensor:
        """Multiply a loss by its weight in the step; the mean over no items (NaN) has weight 0. Collective at first."""
        self.has_weighed = True
        self._end_wait()
        if self._is_looking and not self._is_paused and self.rule.watch is not None:
            # A loss that is NaN, because the batch has no labels, tells nothing: the next one may.
            self._is_looking = not self.rule.agree(self.rule.watch.recognise(loss, share.items, num_items))
            self._num_untold += self._is_looking
            empty = [kind for kind in (LABELS, SHIFTED) if not share.items.get(kind, 1)]
            if self._is_looking and empty and not bool(torch.isfinite(loss)):
                return _weighted(loss, 0, self._items.totals.get(empty[0], num_items))
        kind = self.rule.kind or self.hooks.followed(has_count=num_items is not None)
        if kind.what in MEANS and kind.what not in share.items:
            kind = LossKind(UNKNOWN, kind.times_ranks)
        if not self.rule.has_warned and (not self.rule.is_settled or kind.what in (TRUSTED, UNKNOWN)):
            self._warn(kind, share, num_items)
        numerator, denominator = self.weight(kind, share, num_items)
        if kind.what in share.items:
            return _weighted(loss, numerator, denominator)
        factor, model_count = numerator / denominator, self._items.told
        weighted = loss if factor == 1 else loss * factor
        is_divided = kind.what == COUNTED or (kind.what == TRUSTED and self.hooks.uses_model_loss)
        if is_divided and (isinstance(model_count, torch.Tensor) or model_count == 0):
            # A step without labels shows NaN, and its gradient is 0; to any other this adds 0.
            weighted = weighted + 0.0 / torch.as_tensor(model_count, device=loss.device)
        return weighted

    def weight(self, kind: LossKind, share: Share, num_items: Count | None) -> tuple[Any, Any]:
        """Return numerator and denominator of the weight of a loss of a kind, by the rule at the top of this module.

        Args:
            num_items: The total of what is not counted here.
        """
        num_ranks = 1 if kind.times_ranks else self.num_counted_ranks
        if kind.what in share.items:
            return share.items[kind.what] * num_ranks, self._items.totals.get(kind.what, num_items)
        if kind.what in (COUNTED, TRUSTED):
            return num_ranks, 1
        # DDP's mean over ranks is wanted here: what was multiplied by the ranks is divided by them.
        return share.part / self.num_micro_batches * num_ranks, self.num_counted_ranks

    def weighing(self, batch: Any, num_items: Count | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that multiplies losses of a micro-batch by its weight in the step."""
        return partial(self.weigh, share=self.share_of(batch), num_items=num_items) if self.is_on else lambda loss: loss

    def _differ(self, share: Share, num_items: Count | None, without: str = "") -> bool:
        """Return whether the possible kinds give a micro-batch different weights."""
        ratios = [self.weight(each, share, num_items) for each in self.rule.candidates if each.what != without]
        weights = [float(numerator) / max(float(denominator), 1.0) for numerator, denominator in ratios]
        return max(weights) - min(weights) > 1e-9 * max(weights)

    def _warn(self, kind: LossKind, share: Share, num_items: Count | None) -> None:
        """Warn of a loss of an unknown kind, or of several possible ones, if that can matter."""
        rule, hooks, num_ranks = self.rule, self.hooks, self.num_counted_ranks
        num_parts = self.num_micro_batches * round(1 / share.part)
        is_even = self._is_even(share, num_parts)
        is_promised = hooks.is_declared or (hooks.is_trusted and rule.kind is not None)
        if not rule.is_settled and (rule.candidates or self._num_untold < 4):
            if rule.candidates and share.items and self._differ(share, num_items, without=WEIGHTED):
                by = kind.what.replace("_", " ")
                rule.warn(f"It is weighted by its {by}, which differ between batches", is_ambiguous=True)
        elif kind.what == TRUSTED and is_promised:
            rule.has_warned = True  # there is nothing to warn of
        elif self._may_be_too_large and rule.kind is None:
            rule.warn("Multiply it by strategy.data.world_size at most: some processes of the mesh share samples")
        elif kind.what == TRUSTED:
            factor = num_parts if hooks.overrides_loss else num_parts * num_ranks
            rule.warn(
                "As in transformers, it is used as it is, for the item count of the step may have divided it: if not, "
                f"with {num_parts} micro-batches and {num_ranks} process(es) it is {factor} times a mean"
            )
        elif kind.what == UNKNOWN and not is_even and num_parts * num_ranks > 1:
            rule.warn("It is averaged over micro-batches and processes, whatever they hold")

    def _is_even(self, share: Share, num_parts: int) -> bool:
        """Return whether all micro-batches until now held equally many items, and note this one's.

        What is on a device is not read for this.
        """
        counts = share.items.get(LABELS), share.items.get(SAMPLES), known_count(self._items.totals.get(LABELS))
        labels, samples, total = (None if isinstance(count, torch.Tensor) else count for count in counts)
        self._sizes.add((labels, samples, share.part))
        is_whole = not labels or not total or labels * num_parts * self.num_counted_ranks == total
        return len(self._sizes) < 2 and bool(share.items) and is_whole

    def is_weighed(self, num_items: Count | None) -> bool:
        """Return whether a step's losses were weighted, here or by the model, which divides by the item count."""
        is_told = num_items is not None and self.model_task is not None and self.model_task.gives_count
        return self.has_weighed or is_told


def _weighted(loss: torch.Tensor, items: Any, total: Any) -> torch.Tensor:
    """Return a mean loss multiplied by its share of the mean over a step's items.

    The mean over no items (NaN) has share 0, and a step without items the loss NaN; both have the gradient 0.
    """
    total = known_count(total)
    if isinstance(total, torch.Tensor) or isinstance(items, torch.Tensor):
        # At least float32: 16 bits are too few for the count.
        dtype = torch.promote_types(loss.dtype, torch.float32)
        items, total = (torch.as_tensor(each).to(loss.device, dtype, non_blocking=True) for each in (items, total))
        factor: torch.Tensor = (items / total).to(loss.dtype)
        return torch.where(items > 0, loss, 0.0) * factor
    if not items:
        return torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0 if total else float("nan"))
    return loss * float(items / total)
