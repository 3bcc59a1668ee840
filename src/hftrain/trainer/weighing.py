"""Loss normalisation: a micro-batch's mean loss becomes its share of the step's mean over all items."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import TaskError
from hftrain.core.log import get_logger
from hftrain.core.tree import batch_size_of
from hftrain.strategies.base import Strategy
from hftrain.task.introspect import takes_item_count
from hftrain.task.items import SAMPLES, SHIFTED, SUM, counted
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule, checked_count
from hftrain.task.noted import Note, NotedCount
from hftrain.trainer.means import MeanSearch

logger = get_logger(__name__)

Count = int | torch.Tensor

_SEES_COUNT = ("get_batch_samples", "_get_num_items_in_batch", "training_step", "compute_loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossHooks:
    """The parts of a Trainer that affect the loss of a step.

    Args:
        compute_loss_func: The Trainer's argument: None, a function, or another library's marker.
        is_overridden: Returns whether the user's class overrides a hook.
        takes_count: Whether `compute_loss` takes `num_items_in_batch`.
        accepts_count: The documented `model_accepts_loss_kwargs`.
        says_divided: The documented `loss_is_scaled_for_ga`, None if it is not set.
    """

    compute_loss: Callable[..., Any]
    compute_loss_func: Any
    is_overridden: Callable[[str], bool]
    takes_count: bool
    accepts_count: bool
    says_divided: bool | None
    is_compiled: bool
    get_batch_samples: Callable[..., Any]


class LossShares:
    """Count the items of a step, and multiply each micro-batch's loss by its share of them.

    Attributes:
        has_weighed: Whether a loss was weighted here; False if a user's step does not call the documented one.
    """

    def __init__(
        self, args: TrainingArguments, strategy: Strategy, task: TaskModule, hooks: LossHooks, search: MeanSearch
    ) -> None:
        self._strategy, self._task, self._hooks, self.search = strategy, task, hooks, search
        self._accumulates = args.gradient_accumulation_steps > 1
        # The number of micro-batches of the current step.
        self.num_micro_batches = args.gradient_accumulation_steps
        self.plain = task if isinstance(task, ModelTask) else None
        self.num_ranks = strategy.world_size if args.average_tokens_across_devices else 1
        self.is_on = args.gradient_accumulation_steps > 1 or self.num_ranks > 1
        function = hooks.compute_loss_func if callable(hooks.compute_loss_func) else None
        is_overridden = hooks.is_overridden("compute_loss")
        # The loss of a compute_loss override is already divided if `says_divided` is set, or if a marker is set in
        # place of the function, as other libraries do.
        says = hooks.says_divided
        is_marked = hooks.compute_loss_func is not None and function is None
        self.is_divided = bool(is_marked if says is None else says) and is_overridden
        # User code that computes the loss receives the count and may or may not divide by it.
        self._is_users = is_overridden or function is not None
        # The documented method undoes the mean over ranks, and so do copies of its code.
        code = getattr(hooks.compute_loss, "__code__", None)
        self._scales = is_overridden and code is not None and "num_processes" in code.co_names
        divides = (
            takes_item_count(function) if function is not None else hooks.accepts_count or args.label_smoothing_factor
        )
        self._may_divide = bool(divides and hooks.takes_count and self.plain is not None)
        self._watch = _CountWatch(strategy, hooks, self.plain, function, is_overridden=is_overridden)
        self._watch.is_on &= not self.is_divided
        self._is_read = function is not None or any(map(hooks.is_overridden, _SEES_COUNT))
        self._does_divide: bool | None = None
        self._note: Note | None = None
        self._window_samples = 1
        self.has_weighed = False
        self._counted: dict[int, tuple[Any, Count]] = {}
        self._total: Count | None = None
        self._wait: Callable[[], Any] | None = None
        if self.plain is not None:
            self.plain.accepts_item_count = hooks.accepts_count
            # Copies on several devices divide exactly by a count, but their means are weighted by samples; and a
            # user's own step may rely on the model to divide.
            is_copied = getattr(strategy, "num_devices", 1) > 1
            self.plain.keeps_count = is_copied or self.is_divided or hooks.is_overridden("training_step")

    # -- counting --------------------------------------------------------------------------------------------------

    def take(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Count | None]:
        """Take a step's micro-batches; count their samples, which weight losses without an item count."""
        self._total, self._counted = None, {}
        taken = self._hooks.get_batch_samples(epoch_iterator, num_batches, device)
        if not isinstance(taken, (tuple, list)) or len(taken) != 2 or not isinstance(taken[0], (list, tuple)):
            raise TaskError(
                "get_batch_samples was called.",
                f"It returned a {type(taken).__name__} that is not a pair of a list of batches and their item count.",
                "Return (batches, num_items_in_batch); the count may be None, and no batches end the epoch.",
            )
        batches, num_items = taken
        self.num_micro_batches = len(batches)
        if self.is_on and num_items is None:
            self._window_samples = sum(map(self._samples_of, batches))
        return batches, num_items

    def count(self, batches: list[Any], device: torch.device | None) -> Count | None:
        """Return the item count of a step, over all ranks if the arguments ask for it; None if unused. Collective."""
        if not batches or not (self.is_on or self._may_divide or self.is_divided):
            return None
        task = self.plain
        if task is not None:
            if self.search.is_open:
                self.search.look(batches)
            if (self._may_divide or self.is_divided) and not all(map(task.label_key, batches)):
                return None
            if not (self.is_on or self._is_users or task.label_smoothing or task.gives_count):
                return None
        if self._does_divide is False and self._watch.is_on:
            self._watch.see(batches)
        counts = list(map(self._items_of, batches))
        self._counted = dict(zip(map(id, batches), zip(batches, map(_known, counts), strict=True), strict=True))
        self._total, wait = self._sum(counts, device)
        if self._is_read or (task is not None and (task.label_smoothing or task.gives_count)):
            wait()
        else:
            # Not read before the loss is weighted, so the reduction and the forward pass overlap.
            self._wait = wait
        if task is None or not self._is_read or task.gives_count or task.kind == task.label_kind:
            return self._total
        # The documented count, which the user's code may divide by.
        labels, wait = self._sum([task.count_labels(batch) for batch in batches], device)
        wait()
        return labels

    def count_for_evaluation(self, batch: Any) -> Count | None:
        """Return a batch's own item count, for a loss that may divide by it; else None."""
        task = self.plain
        if self._watch.is_on and not (self._may_divide or self._does_divide or self.is_divided):
            self._watch.see([batch])
        if task is None or not self._may_divide or task.label_key(batch) is None:
            return None
        found = task.mean_over or self.search.found
        needs_count = self._is_users or (found is not None and found.needs_count)
        if not needs_count:
            return None
        # A loss that undoes the mean over ranks expects the item count of all ranks.
        return task.count_labels(batch) * (self.num_ranks if self._scales else 1)

    def _samples_of(self, batch: Any) -> int:
        return (batch_size_of(batch) or 1) if self.plain is None else self.plain.num_samples(batch)

    def _items_of(self, batch: Any) -> Count:
        task = self._task
        is_countable = self.plain is not None or type(task).count_items is not TaskModule.count_items
        if is_countable or self._accumulates or batch_size_of(batch) is not None:
            return checked_count(task.count_items(batch), task.count_items)
        # One per batch, as DDP weights it.
        return 1

    def _sum(self, counts: list[Any], device: torch.device | None) -> tuple[Count, Callable[[], Any]]:
        total = counts[0] if len(counts) == 1 else sum(counts)
        if self.num_ranks == 1:
            return total, lambda: None
        # reduce_later moves the count to the device without waiting.
        return self._strategy.reduce_later(torch.as_tensor(total))

    # -- weighing --------------------------------------------------------------------------------------------------

    def share_of(self, batch: Any, num_items: Count | None) -> Count:
        """Return the weight of a micro-batch, as counted before hooks could change the batch."""
        if num_items is None:
            return self._samples_of(batch)
        counted = self._counted.get(id(batch))
        return _known(self._items_of(batch)) if counted is None or counted[0] is not batch else counted[1]

    def noted(self, num_items: Count | None) -> Count | None:
        """Return the count to pass to `compute_loss`; for user code, the first one records how it is used."""
        is_new = self._does_divide is None and self._is_users and num_items is not None
        if not is_new or not self._hooks.takes_count:
            return num_items
        if self._hooks.is_overridden("compute_loss") and self._hooks.is_compiled:
            # Compiled code cannot record the use.
            self._does_divide = self._may_divide
            return num_items
        self._note = Note()
        return NotedCount.make(num_items, self._note)  # type: ignore[arg-type]

    def weigh(self, loss: torch.Tensor, share: Count, num_items: Count | None) -> torch.Tensor:
        """Multiply a loss by its share of the step; the mean over no items (NaN) has share 0.

        DDP averages gradients over ranks: if the count is over all ranks, the averaging is undone.
        """
        self.has_weighed = True
        if self.is_divided:
            return loss * self.num_ranks if self._takes_divided() else loss
        if num_items is None:
            return loss * share / self._window_samples
        if self._divides():
            return loss if self._scales else loss * self.num_ranks
        if self._wait is not None:
            self._wait()
            self._wait = None
        return _scaled(loss, share, self.num_ranks, num_items if self._total is None else self._total)

    def over_ranks(self, loss: torch.Tensor, num_items: Count | None) -> torch.Tensor:
        """Undo DDP's mean over ranks, as documented, for a user's own step that calls `compute_loss`."""
        task = self.plain
        if self.num_ranks == 1 or num_items is None or task is None:
            return loss
        divides = task.gives_count if task.returns_loss else task.label_smoothing or task.function_takes_count
        return loss * self.num_ranks if divides else loss

    def is_weighed(self, num_items: Count | None) -> bool:
        """Return whether a step's losses were weighted, here or by the model, which divides by the item count."""
        return self.has_weighed or (num_items is not None and self.plain is not None and self.plain.gives_count)

    def _takes_divided(self) -> bool:
        """Return whether a loss declared as divided comes from the model, which does not account for the ranks."""
        if self._does_divide is None and self._note is not None:
            self._does_divide = bool(self._note.divides) and not self._scales
            if self._note.divides is False and self._accumulates:
                logger.warning(
                    "loss_is_scaled_for_ga=True was set, and compute_loss takes the loss of %s from super(), which "
                    "does not divide it by num_items_in_batch: it is the mean of one micro-batch. Divide it by the "
                    "number of micro-batches, or leave loss_is_scaled_for_ga out, and it is weighed for you.",
                    type(self._strategy.unwrap(self._task.model)).__name__,
                )
            self._note = None
        return bool(self._does_divide)

    def _divides(self) -> bool:
        """Return whether the loss is already divided by the item count; collective on first use for a user loss."""
        if not self._is_users:
            return self.plain is not None and bool(self.plain.label_smoothing or self.plain.gives_count)
        if self._does_divide is None:
            note = self._note or Note()
            divides = note.is_read if note.divides is None else note.divides
            self._does_divide = not self._strategy.all_true(not divides)
            self._note = None
            if note.divides is None and not self._does_divide and self._watch.is_on:
                self._watch.see([batch for batch, _ in self._counted.values()])
            else:
                self._watch.is_on = False
            function = self._hooks.compute_loss_func
            if callable(function) and takes_item_count(function) and not self._does_divide:
                logger.warning(
                    "compute_loss_func takes num_items_in_batch and does not use it: its loss is treated as the mean "
                    "over a micro-batch's items. A sum must be divided by num_items_in_batch."
                )
        return self._does_divide


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


class _CountWatch:
    """Warn once how a user's loss is weighted if samples hold unequal numbers of labels.

    Args:
        hooks: The code of a `compute_loss` override shows whether it calls super() or reads the model's loss.
        task: None if no plain model is trained.
    """

    def __init__(
        self,
        strategy: Strategy,
        hooks: LossHooks,
        task: ModelTask | None,
        function: Callable[..., Any] | None,
        *,
        is_overridden: bool,
    ) -> None:
        self._strategy, self._task, self._has_function = strategy, task, function is not None
        code = getattr(hooks.compute_loss, "__code__", None)
        names: set[str] = set() if code is None or not is_overridden else {*code.co_names, *map(str, code.co_consts)}
        # A function that takes the count without using it gets another warning.
        is_own = is_overridden or (function is not None and not takes_item_count(function))
        self._takes_models = "loss" in names
        self.is_on = is_own and "super" not in names and task is not None and task.count_rule is None
        self._counts: set[int] = set()
        self._num_looks = 0

    def see(self, batches: list[Any]) -> None:
        """Check the labels of batches, ever more rarely, because reading them waits for a device."""
        task = self._task
        assert task is not None
        self._num_looks += 1
        if self._num_looks & (self._num_looks - 1) or task.kind in (SAMPLES, SUM):
            return
        found = task.mean_over
        if self._takes_models and (found is None or (found.is_final and found.is_exact)):
            return
        for labels in map(task.label_tensor, batches):
            if labels is not None and labels.dim():
                marks = counted(labels[..., 1:] if task.kind == SHIFTED else labels, task.ignored_labels)
                self._counts.update(marks.reshape(len(marks), -1).sum(1).tolist())
        if len(self._counts) > 1:
            self.is_on = False
            if self._strategy.is_main:
                logger.warning(
                    "The loss of %s does not use num_items_in_batch, and the samples hold unequal numbers of labels: "
                    "it is treated as a mean over them, weighted by their number. If it is a mean over samples, pass "
                    'count_items="samples" to the Trainer; count_items="%s" keeps this without a warning.',
                    "compute_loss_func" if self._has_function else "compute_loss",
                    task.kind,
                )
