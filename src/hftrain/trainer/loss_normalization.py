"""Loss normalisation: a micro-batch's loss becomes its share of the step's mean over all items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any

import torch

from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import TaskError
from hftrain.core.preserve import temporarily
from hftrain.core.tree import batch_size_of
from hftrain.strategies.base import Strategy
from hftrain.task.items import LABELS, SUM
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule, checked_count
from hftrain.trainer.loss_finding import ALIKE, ITEMS, MEANS, LossFinding, LossHooks
from hftrain.trainer.proofs import COUNTED, DIVIDED, PLAIN, Finding, Watch, label_numbers

Count = int | torch.Tensor
Counts = Mapping[str, Any]


class LossShares:
    """Count the items of a step, and multiply each micro-batch's loss by its share of them.

    Attributes:
        found: What the loss is.
        has_weighed: Whether a loss was weighted here; False if a user's step does not call the documented one.
    """

    def __init__(self, args: TrainingArguments, strategy: Strategy, task: TaskModule, hooks: LossHooks) -> None:
        self._data, self._task, self.hooks = strategy.data, task, hooks
        self._accumulates = args.gradient_accumulation_steps > 1
        # The number of micro-batches of the current step.
        self.num_micro_batches = args.gradient_accumulation_steps
        self.num_ranks = strategy.data.world_size if args.average_tokens_across_devices else 1
        is_meshed = self._data.world_size < strategy.world_size  # where a copied compute_loss may be too large
        self.is_on = self._accumulates or self.num_ranks > 1 or (is_meshed and hooks.is_overridden("compute_loss"))
        self.plain = task if isinstance(task, ModelTask) else None
        watch = None
        if self.plain is not None:
            self.plain.accepts_item_count = hooks.accepts_count
            is_copied = getattr(strategy, "num_devices", 1) > 1
            options: Any = {"is_copied": is_copied, "strategy": strategy}
            watch = Watch(strategy.unwrap(task.model), self.plain.label_tensor, **options)
        self.found = LossFinding(hooks, self.plain, strategy, watch, num_ranks=self.num_ranks)
        self.has_weighed = self._is_paused = self._is_first = False
        self._num_whole = self._num_shares = 0
        self._counted: dict[int, tuple[Any, Counts]] = {}
        self._totals: Counts | None = None
        self._wait: Callable[[], Any] | None = None

    # -- counting --------------------------------------------------------------------------------------------------

    def take(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Count | None]:
        """Take a step's micro-batches and count their items."""
        self._totals, self._counted, self._is_first, self._num_shares = None, {}, False, 0
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
            if self._totals is None:  # the user's own counting
                self.count(list(batches), device)
            if self.plain is None:
                # The user's count, if any, is the total; a plain model's loss may be divided by it.
                self._totals = {} if num_items is not None else self._totals
            elif len(self.found.candidates) > 1 and not self._is_first:
                _, share = next(iter(self._counted.values()))
                self._is_first = self.found.is_decisive(lambda finding: float(self._weight(finding, share, num_items)))
        return batches, num_items

    def count(self, batches: list[Any], device: torch.device | None) -> Count | None:
        """Return the item count of a step, over all ranks if the arguments ask for it; None if unused. Collective."""
        if not batches:
            return None
        given: Any = self._given(batches)
        if not self.is_on:
            return given  # type: ignore[no-any-return]
        self._is_first = self.found.is_scheduled()
        kinds = self._kinds()
        counts = [self._count_kinds(batch, kinds) for batch in batches]
        self._counted = dict(zip(map(id, batches), zip(batches, counts, strict=True), strict=True))
        sums = [sum(each[kind] for each in counts) for kind in kinds]
        totals, wait = self._over_ranks(sums if given is None else [*sums, given])
        self._totals = dict(zip(kinds, totals, strict=False))
        if given is None:
            # Not read before the loss is weighted, so the reduction and the forward pass overlap.
            self._wait = wait
            return totals[0] if self.plain is None else None
        wait()
        # A step without labels has the loss 0, and not 0 / 0.
        return totals[-1].clamp(min=1)  # type: ignore[no-any-return]

    def _given(self, batches: list[Any]) -> Any:
        """Return this rank's `num_items_in_batch` for user code and models; None where transformers has none."""
        task, hooks = self.plain, self.hooks
        if task is None or (task.count_rule is not None and hooks.is_plain):
            return None
        is_smoothed = bool(task.label_smoothing) and hooks.is_plain and not hooks.is_declared
        if not hooks.takes_count and not hooks.is_scaled and not is_smoothed:
            return None
        counts = [task.documented_count(batch, shifts=hooks.shifts_labels) for batch in batches]
        return None if any(count is None for count in counts) else sum(counts)

    def _kinds(self) -> tuple[str, ...]:
        """Return the kinds of items to count in the current step."""
        if self._is_first or len(self.found.candidates) > 1:
            return MEANS
        finding = self.found.finding
        return (finding.what,) if finding is not None and finding.what in (ITEMS.what, *MEANS) else ()

    def _count_kinds(self, batch: Any, kinds: tuple[str, ...]) -> Counts:
        task = self._task
        if kinds != (ITEMS.what,):
            return {kind: _known(self.plain.count_as(kind, batch)) for kind in kinds} if self.plain is not None else {}
        is_countable = self.plain is not None or type(task).count_items is not TaskModule.count_items
        if is_countable or self._accumulates or batch_size_of(batch) is not None:
            return {ITEMS.what: _known(checked_count(task.count_items(batch), task.count_items))}
        # One per batch, as DDP weights it.
        return {ITEMS.what: 1}

    def _over_ranks(self, counts: list[Any]) -> tuple[list[Any], Callable[[], Any]]:
        """Return the sums of counts over all ranks, which are valid after calling the function."""
        if self.num_ranks == 1 or not counts:
            return counts, lambda: None
        # reduce_later moves the counts to the device without waiting.
        if len(counts) == 1:
            total, wait = self._data.reduce_later(torch.as_tensor(counts[0]))
            return [total], wait
        totals, wait = self._data.reduce_later(torch.stack([torch.as_tensor(each).reshape(()) for each in counts]))
        return list(totals), wait

    def count_for_evaluation(self, batch: Any) -> Count | None:
        """Return the count to pass to the loss of an evaluation batch, or None.

        A loss that undoes the mean over ranks expects the item count of all ranks.
        """
        count = self._given([batch])
        return None if count is None else count * self.num_ranks

    # -- weighing --------------------------------------------------------------------------------------------------

    def share_of(self, batch: Any) -> Counts:
        """Return the counts of a micro-batch, as counted before hooks could change it."""
        self._num_shares += 1
        counted = self._counted.get(id(batch))
        if counted is not None and counted[0] is batch:
            return counted[1]
        if self.plain is not None and not self._num_whole and self.found.finding is not ITEMS:
            # A hook has changed the batch; with other items than those that were counted, its share is unknown.
            before: Counts = next((each for _, each in islice(self._counted.values(), self._num_shares - 1, None)), {})
            return before if self._count_kinds(batch, tuple(before)) == before else {}
        counts = self._count_kinds(batch, self._kinds())
        return {**counts, "part": self._num_samples(batch) / self._num_whole} if self._num_whole else counts

    def split(self, batch: Any) -> None:
        """Say which batch the next micro-batches are parts of; None for none."""
        self._num_whole = 0 if batch is None else self._num_samples(batch)

    def paused(self) -> AbstractContextManager[None]:
        """Prove nothing: an attempt that may run out of memory in one process alone must not communicate."""
        return temporarily(self, _is_paused=True)

    def _num_samples(self, batch: Any) -> int:
        return (batch_size_of(batch) or 1) if self.plain is None else self.plain.num_samples(batch)

    def open(self, batch: Any) -> None:
        """Start to observe a loss that may have to be proved."""
        if self._is_looking and self.found.watch is not None:
            self.found.watch.open(batch)

    @property
    def _is_looking(self) -> bool:
        return self._is_first and not self._is_paused

    def weigh(self, loss: torch.Tensor, share: Counts, num_items: Count | None) -> torch.Tensor:
        """Multiply a loss by its share of the step; the mean over no items (NaN) has share 0.

        DDP averages gradients over ranks: if the count is over all ranks, the averaging is undone.
        """
        self.has_weighed = True
        if self._wait is not None:
            self._wait()
            self._wait = None
        if self._is_looking:
            # A loss that is NaN, because the batch has no labels, tells nothing: the next one may.
            self._is_first = not self.found.look(
                loss,
                share,
                num_items,
                lambda finding: float(self._weight(finding, share, num_items)),
                num_micro_batches=self.num_micro_batches,
                is_uneven=self._is_uneven(),
            )
            if self._is_first and not share.get(LABELS, 1) and not bool(torch.isfinite(loss)):
                return _scaled(loss, 0, 1, 1)
        finding = self.found.finding or self.hooks.followed(has_count=num_items is not None)
        if finding.what in MEANS and finding.what not in share:
            finding = self.found.follow(has_count=num_items is not None)
        if finding.what in share:
            return _scaled(loss, share[finding.what], self._num_ranks_of(finding), self._total(finding, num_items))
        factor = self._weight(finding, share, num_items)
        return loss if factor == 1 else loss * factor

    def weighing(self, batch: Any, num_items: Count | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that multiplies losses of a micro-batch by its share of the step."""
        return partial(self.weigh, share=self.share_of(batch), num_items=num_items) if self.is_on else lambda loss: loss

    def _num_ranks_of(self, finding: Finding) -> int:
        return 1 if finding.is_scaled else self.num_ranks

    def _total(self, finding: Finding, num_items: Count | None) -> Any:
        return num_items if self._totals is None else self._totals.get(finding.what, num_items)

    def _weight(self, finding: Finding, share: Counts, num_items: Count | None) -> Any:
        """Return the factor of a loss that is a finding."""
        part, num_ranks = share.get("part", 1), self._num_ranks_of(finding)
        if finding.what in share:
            return share[finding.what] * num_ranks / max(float(self._total(finding, num_items)), 1.0)
        if finding.what == COUNTED:
            return num_ranks
        if finding.what in (PLAIN, SUM, ALIKE.what):
            return part / self.num_micro_batches / (self.num_ranks if finding.is_scaled else 1)
        return part / (self.num_ranks if finding.is_scaled else 1) if finding.what == DIVIDED else 1

    def _is_uneven(self) -> bool:
        """Return whether samples or micro-batches of the current step hold unequal numbers of labels."""
        assert self.plain is not None
        batches = [batch for batch, _ in self._counted.values()]
        sizes = {self.plain.num_samples(batch) for batch in batches}
        return len(sizes) > 1 or len(set().union(*(label_numbers(self.plain.label_tensor(b)) for b in batches))) > 1

    def is_weighed(self, num_items: Count | None) -> bool:
        """Return whether a step's losses were weighted, here or by the model, which divides by the item count."""
        return self.has_weighed or (num_items is not None and self.plain is not None and self.plain.gives_count)


def _known(count: Count) -> Any:
    """Return a count as a number, unless reading it would wait for a device."""
    return count.item() if type(count) is torch.Tensor and count.is_cpu else count


def _scaled(loss: torch.Tensor, share: Any, num_ranks: int, total: Any) -> torch.Tensor:
    """Return a mean loss scaled to its share of the mean over a step's items; 0 for a mean over no items (NaN)."""
    total = _known(total)
    if isinstance(total, torch.Tensor) or isinstance(share, torch.Tensor):
        # At least float32: 16 bits are too few for the count.
        dtype = torch.promote_types(loss.dtype, torch.float32)
        if isinstance(total, torch.Tensor):
            total = total.to(loss.device, dtype, non_blocking=True)
        if isinstance(share, torch.Tensor):
            share = share.to(loss.device, dtype, non_blocking=True)
            # Both are masked, so that no NaN reaches the gradient: neither the loss's nor that of 0 / 0.
            factor = torch.where(share > 0, share * num_ranks / total, 0.0)
            return torch.where(share > 0, loss, 0.0) * factor.to(loss.dtype)
    if not share:
        return torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)
    factor = share * num_ranks / total
    return loss * (factor.to(loss.dtype) if isinstance(factor, torch.Tensor) else factor)
