"""Loss normalisation: a micro-batch's loss becomes its share of the step's mean over all items.

What a loss is a mean over is, in this order:

1. declared, and obeyed (`LossHooks.declared`);
2. recognised by its value (`loss_kinds`) in the first batch that can tell, for the whole run. Kinds that give the same
   value stay possible until a batch tells them apart; a kind that was excluded does not come back;
3. followed: treated as transformers does (`LossHooks.followed`), with one warning if that can matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hftrain.arguments.training import TrainingArguments
from hftrain.checkpoint.participants import InManifest
from hftrain.core.errors import TaskError
from hftrain.core.log import get_logger
from hftrain.core.preserve import temporarily
from hftrain.core.tree import batch_size_of
from hftrain.strategies.base import Strategy
from hftrain.task.introspect import takes_item_count
from hftrain.task.items import LABELS, SAMPLES, SHIFTED
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule, checked_count
from hftrain.trainer.loss_kinds import COUNTED, PLAIN, TRUSTED, WEIGHTED, WHATS, CallWatch, LossKind, recognise

Count = int | torch.Tensor
Counts = Mapping[str, Any]

logger = get_logger(__name__)

MEANS = (LABELS, SHIFTED, SAMPLES)
# A mean over what `count_items` counts, and transformers' treatments of a loss of an unknown kind: use it as it is,
# trusting that it is divided by the item count and scaled, or average it over micro-batches.
ITEMS, AS_IS, ALIKE = LossKind("items"), LossKind(TRUSTED, is_scaled=True), LossKind(PLAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossHooks:
    """The parts of a Trainer that affect the loss of a step.

    Args:
        owner: The name of the Trainer's class.
        compute_loss_func: The Trainer's argument: None, a function, or another library's marker.
        overrides_loss: Whether the user's class overrides `compute_loss`.
        accepts_count: The documented `model_accepts_loss_kwargs`.
        is_declared: Whether the user's class has set that.
        is_trusted: Whether the model's class says that it divides its loss by the count: by `accepts_loss_kwargs`, or
            as one of transformers' decoders.
        is_scaled: The documented `loss_is_scaled_for_ga`, None if it is not set.
        loss_takes_count: Whether `compute_loss` takes the count; in its older form it does not.
        shifts_labels: The attribute `_loss_shifts_labels` of transformers' Trainer.
    """

    owner: str
    compute_loss_func: Any
    overrides_loss: bool
    accepts_count: bool
    is_declared: bool
    is_trusted: bool
    is_scaled: bool | None
    loss_takes_count: bool
    shifts_labels: bool
    get_batch_samples: Callable[..., Any]

    @property
    def is_plain(self) -> bool:
        """Whether the model's loss is used: no user code computes one."""
        return self.compute_loss_func is None and not self.overrides_loss

    @property
    def takes_count(self) -> bool:
        """Whether transformers counts items: for a model that accepts the count, or for a loss function."""
        return self.accepts_count or self.compute_loss_func is not None

    def declared(self, task: ModelTask | None) -> LossKind | None:
        """Return what is declared of the loss, None if nothing is."""
        if task is None or task.count_rule is not None:
            return ITEMS
        # Other libraries set a marker in place of a function, and divide the loss themselves.
        if self.is_scaled is not None or not (self.compute_loss_func is None or callable(self.compute_loss_func)):
            return self.followed(has_count=True)
        if self.is_declared and not self.takes_count:
            return ALIKE
        return LossKind(task.smoothed_items) if self.is_plain and task.label_smoothing else None

    def followed(self, *, has_count: bool) -> LossKind:
        """Return how transformers treats the loss."""
        if self.is_scaled is not None:
            return AS_IS if self.is_scaled else ALIKE
        function = self.compute_loss_func
        is_given = has_count if function is None else not callable(function) or takes_item_count(function)
        return AS_IS if is_given and self.takes_count and self.loss_takes_count else ALIKE


class LossRule:
    """What a loss is, the same on all processes.

    Attributes:
        kind: None as long as nothing is known, and if no kind was recognised.
        candidates: What the loss can still be.
        is_settled: Whether no further batch is looked at.
        watch: Observes a plain model.
        has_warned: Whether its one warning has been given, or is not needed.
    """

    def __init__(self, hooks: LossHooks, task: ModelTask | None, strategy: Strategy, *, num_ranks: int) -> None:
        self.hooks, self.strategy, self.num_ranks = hooks, strategy, num_ranks
        self.kind, self.candidates = hooks.declared(task), list[LossKind]()
        self.is_declared = self.is_settled = self.has_warned = self.kind is not None
        self.watch = None if task is None else CallWatch(task, strategy)

    def look(self, loss: torch.Tensor, counts: Counts, total: Any) -> bool:
        """Look at the loss of a micro-batch; return whether it told anything, on any process. Collective."""
        assert self.watch is not None
        # The last stage of a pipeline sees what the model returns.
        is_elsewhere, calls = self.strategy.has_outputs(self.watch.model) is None, self.watch.close()
        found = None if is_elsewhere else recognise(loss, calls, counts, total, self.num_ranks)
        every = [LossKind(what, is_scaled) for what in WHATS for is_scaled in (False, True)]
        flags = [int(found is not None and each not in found) for each in every] + [int(found is not None)]
        if self.strategy.world_size > 1:
            flags = self.strategy.reduce(torch.tensor(flags, device=self.strategy.device), op="max").tolist()
        *missing, is_told = flags
        if is_told:
            left = [each for each, is_gone in zip(every, missing, strict=True) if not is_gone]
            left = [each for each in left if not self.candidates or each in self.candidates]
            self._keep([each for each in left if each.what not in (TRUSTED, PLAIN)] or left)
        return bool(is_told)

    def _keep(self, candidates: list[LossKind]) -> None:
        self.candidates, self.is_settled = candidates, len(candidates) < 2
        self.kind = candidates[0] if candidates else None

    def warn(self, treatment: str) -> None:
        """Say once how a loss of an unknown kind is treated."""
        self._warn(
            f"Cannot prove what the loss of {self._maker} is a mean over. As in transformers, {treatment}. Pass "
            'count_items= to the Trainer ("labels", "samples", or a function of the batch) to weight it by these '
            "items; or set loss_is_scaled_for_ga in the Trainer's class: True if it is divided for the whole step "
            "already, False if it is the mean over a micro-batch."
        )

    def warn_of_ambiguity(self, what: str) -> None:
        """Say once that the items by which batches are weighted may be the wrong ones."""
        self._warn(
            f"The loss of {self._maker} is the mean over {what.replace('_', ' ')}, and in the batches seen so far the "
            "mean over samples is the same number. It is weighted by their number, which differs between batches. If "
            'it is the mean over samples, pass count_items="samples" to the Trainer; '
            f'count_items="{what}" keeps this without a warning.'
        )

    def _warn(self, message: str) -> None:
        if not self.has_warned and self.strategy.is_main:
            logger.warning(message)
        self.has_warned = True

    @property
    def _maker(self) -> str:
        if self.hooks.overrides_loss:
            return f"{self.hooks.owner}.compute_loss"
        is_function = self.hooks.compute_loss_func is not None or self.watch is None
        return "compute_loss_func" if is_function else type(self.watch.model).__name__  # type: ignore[union-attr]

    @property
    def fact(self) -> InManifest:
        """What a checkpoint's manifest records, so that a resumed run weights batches as the uninterrupted one."""
        name = "loss_finding"
        return InManifest(lambda: {name: self._state()}, lambda facts: self._load(facts.get(name)))

    def _state(self) -> dict[str, Any] | None:
        is_known = not self.is_declared and (self.is_settled or self.candidates)
        return {"left": [list(each) for each in self.candidates], "of": self._maker} if is_known else None

    def _load(self, state: Mapping[str, Any] | None) -> None:
        if state is None or self.is_declared or state.get("left") is None:
            return
        if state.get("of", self._maker) == self._maker:
            self._keep([LossKind(*each) for each in state["left"] if each[0] in WHATS])
        else:
            logger.warning(
                "The loss is not that of the checkpoint but that of %s: it is recognised again.", self._maker
            )


class LossShares:
    """Count the items of a step, and multiply each micro-batch's loss by its share of them.

    Attributes:
        rule: What the loss is.
        has_weighed: Whether a loss was weighted here; False if a user's step does not call the documented one.
    """

    def __init__(self, args: TrainingArguments, strategy: Strategy, task: TaskModule, hooks: LossHooks) -> None:
        self._data, self._task, self.hooks = strategy.data, task, hooks
        self._accumulates = args.gradient_accumulation_steps > 1
        # The number of micro-batches of the current step.
        self.num_micro_batches = args.gradient_accumulation_steps
        self.num_ranks = strategy.data.world_size if args.average_tokens_across_devices else 1
        is_mesh = self._data.world_size < strategy.world_size  # where a copied compute_loss may be too large
        self.is_on = self._accumulates or self.num_ranks > 1 or (is_mesh and hooks.overrides_loss)
        self.plain = task if isinstance(task, ModelTask) else None
        if self.plain is not None:
            self.plain.accepts_item_count = hooks.accepts_count
        self.rule = LossRule(hooks, self.plain, strategy, num_ranks=self.num_ranks)
        self.has_weighed = self._is_paused = self._is_looking = False
        self._num_whole, self._sizes = 0, set[Any]()
        self._counted: dict[int, tuple[Any, Counts]] = {}
        self._totals: dict[str, Any] | None = None
        self._wait: Callable[[], Any] | None = None

    # -- counting --------------------------------------------------------------------------------------------------

    def take(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Count | None]:
        """Take a step's micro-batches and count their items."""
        self._totals, self._counted, self._is_looking = None, {}, False
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
            elif not self.rule.is_settled:
                is_same = bool(self.rule.candidates) and not any(
                    self._differ(share, num_items) for _, share in self._counted.values()
                )
                self._is_looking = not self.rule.strategy.all_true(is_same)
        return batches, num_items

    def count(self, batches: list[Any], device: torch.device | None) -> Count | None:
        """Return the item count of a step, over all ranks if the arguments ask for it; None if unused. Collective."""
        given: Any = self._given(batches) if batches else None
        if not batches or not self.is_on:
            return given  # type: ignore[no-any-return]
        kinds = self._kinds()
        counts = [self._count_kinds(batch, kinds) for batch in batches]
        self._counted = dict(zip(map(id, batches), zip(batches, counts, strict=True), strict=True))
        sums = [sum(each[kind] for each in counts) for kind in kinds]
        totals, wait = self._over_ranks(sums if given is None else [*sums, given])
        self._totals = dict(zip((*kinds, COUNTED), totals, strict=False))
        if given is None:
            # Not read before the loss is weighted, so the reduction and the forward pass overlap.
            self._wait = wait
            return totals[0] if self.plain is None else None
        wait()
        # The loss of a step without labels is shown as NaN, but no 0 / 0 reaches its gradient.
        return totals[-1].clamp(min=1)  # type: ignore[no-any-return]

    def _given(self, batches: list[Any]) -> Any:
        """Return this rank's `num_items_in_batch` for user code and models; None where transformers has none."""
        task, hooks = self.plain, self.hooks
        is_ours = task is not None and (task.count_rule is not None or task.label_smoothing) and hooks.is_plain
        if task is None or is_ours or not (hooks.takes_count or hooks.is_scaled):
            return None
        counts = [task.documented_count(batch, shifts=hooks.shifts_labels) for batch in batches]
        return None if any(count is None for count in counts) else sum(counts)

    def _kinds(self) -> tuple[str, ...]:
        """Return the kinds of items to count in the current step."""
        kind = self.rule.kind
        if not self.rule.is_settled or (not self.rule.has_warned and (kind is None or kind.what == PLAIN)):
            return MEANS
        return (kind.what,) if kind is not None and kind.what in (ITEMS.what, *MEANS) else ()

    def _count_kinds(self, batch: Any, kinds: tuple[str, ...]) -> Counts:
        task, plain = self._task, self.plain
        if kinds != (ITEMS.what,):
            # transformers trains on batches of unknown size, too.
            unknown = None if self.hooks.is_plain and self._accumulates else 1
            return {kind: _known(plain.count_as(kind, batch, unknown=unknown)) for kind in kinds} if plain else {}
        is_countable = plain is not None or type(task).count_items is not TaskModule.count_items
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
        """Return the counts of a micro-batch; empty if a hook has put other items in it than those counted before."""
        counted = self._counted.get(id(batch))
        if counted is not None and counted[0] is batch:
            return counted[1]
        counts = self._count_kinds(batch, self._kinds())
        if self._num_whole:
            return {**counts, "part": self._num_samples(batch) / self._num_whole}
        is_known = self.plain is None or self.rule.kind is ITEMS
        return counts if is_known or any(counts.items() <= each.items() for _, each in self._counted.values()) else {}

    def split(self, batch: Any) -> None:
        """Say which batch the next micro-batches are parts of; None for none."""
        self._num_whole = 0 if batch is None else self._num_samples(batch)

    def paused(self) -> AbstractContextManager[None]:
        """Look at nothing: an attempt that may run out of memory in one process alone must not communicate."""
        return temporarily(self, _is_paused=True)

    def _num_samples(self, batch: Any) -> int:
        return (batch_size_of(batch) if self.plain is None else self.plain.num_samples(batch)) or 1

    def open(self, batch: Any) -> None:
        """Start to observe a loss that will be looked at."""
        if self._is_looking and not self._is_paused and self.rule.watch is not None:
            self.rule.watch.open(batch)

    def weigh(self, loss: torch.Tensor, share: Counts, num_items: Count | None) -> torch.Tensor:
        """Multiply a loss by its share of the step; the mean over no items (NaN) has share 0.

        DDP averages gradients over ranks: if the count is over all ranks, the averaging is undone.
        """
        self.has_weighed = True
        if self._wait is not None:
            self._wait()
            self._wait = None
        if self._is_looking and not self._is_paused:
            # A loss that is NaN, because the batch has no labels, tells nothing: the next one may.
            self._is_looking = not self.rule.look(loss, share, num_items)
            if self._is_looking and not share.get(LABELS, 1) and not bool(torch.isfinite(loss)):
                return _scaled(loss, 0, 1, self._total(LABELS, num_items))
        kind = self.rule.kind or self.hooks.followed(has_count=num_items is not None)
        if kind.what in MEANS and kind.what not in share:
            kind = LossKind(PLAIN, kind.is_scaled)
        if not self.rule.has_warned:
            self._warn(kind, share, num_items)
        num_ranks = 1 if kind.is_scaled else self.num_ranks
        if kind.what in share:
            return _scaled(loss, share[kind.what], num_ranks, self._total(kind.what, num_items))
        factor, total = self._weight(kind, share, num_items), _known((self._totals or {}).get(COUNTED, 1))
        weighed = loss if factor == 1 else loss * factor
        if kind.what not in (COUNTED, TRUSTED) or (not isinstance(total, torch.Tensor) and total):
            return weighed
        return weighed + (0.0 / total if isinstance(total, torch.Tensor) else float("nan"))

    def weighing(self, batch: Any, num_items: Count | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that multiplies losses of a micro-batch by its share of the step."""
        return partial(self.weigh, share=self.share_of(batch), num_items=num_items) if self.is_on else lambda loss: loss

    def _total(self, what: str, num_items: Count | None) -> Any:
        return num_items if self._totals is None else self._totals.get(what, num_items)

    def _weight(self, kind: LossKind, share: Counts, num_items: Count | None) -> Any:
        """Return the factor of a loss of a kind."""
        if kind.what in share:
            num_ranks = 1 if kind.is_scaled else self.num_ranks
            return share[kind.what] * num_ranks / max(float(self._total(kind.what, num_items)), 1.0)
        if kind.what in (COUNTED, TRUSTED):
            return 1 if kind.is_scaled else self.num_ranks
        return share.get("part", 1) / self.num_micro_batches / (self.num_ranks if kind.is_scaled else 1)

    def _differ(self, share: Counts, num_items: Count | None, without: str = "") -> bool:
        """Return whether the kinds that are still possible give a micro-batch different weights."""
        kinds = [each for each in self.rule.candidates if each.what != without]
        weights = [float(self._weight(each, share, num_items)) for each in kinds]
        return max(weights) - min(weights) > 1e-9 * max(weights)

    def _warn(self, kind: LossKind, share: Counts, num_items: Count | None) -> None:
        """Warn of a loss of an unknown kind, or of several possible ones, if that can matter."""
        self._sizes.add((share.get(LABELS), share.get(SAMPLES)))
        if not self.rule.is_settled:
            if self.rule.candidates and share and self._differ(share, num_items, without=WEIGHTED):
                self.rule.warn_of_ambiguity(kind.what)
        elif kind.what == TRUSTED and not (self.hooks.is_declared or (self.hooks.is_trusted and self.rule.kind)):
            factor = self.num_micro_batches * (1 if self.hooks.overrides_loss else self.num_ranks)
            how = "it is used as it is, for the item count of the step may have divided it: if not,"
            where = f"with {self.num_micro_batches} micro-batches and {self.num_ranks} process(es)"
            self.rule.warn(f"{how} {where} it is {factor} times a mean")
        elif kind.what == PLAIN and (len(self._sizes) > 1 or not share) and self.num_micro_batches * self.num_ranks > 1:
            self.rule.warn("it is divided by the number of micro-batches, and averaged over processes")

    def is_weighed(self, num_items: Count | None) -> bool:
        """Return whether a step's losses were weighted, here or by the model, which divides by the item count."""
        return self.has_weighed or (num_items is not None and self.plain is not None and self.plain.gives_count)


def _known(count: Any) -> Any:
    """Return a count as a number, unless reading it would wait for a device."""
    return count.item() if type(count) is torch.Tensor and count.is_cpu else count


def _scaled(loss: torch.Tensor, share: Any, num_ranks: int, total: Any) -> torch.Tensor:
    """Return a mean loss scaled to its share of the mean over a step's items.

    The mean over no items (NaN) has share 0, and a step without items the loss NaN; both have the gradient 0.
    """
    total = _known(total)
    if isinstance(total, torch.Tensor) or isinstance(share, torch.Tensor):
        # At least float32: 16 bits are too few for the count.
        dtype = torch.promote_types(loss.dtype, torch.float32)
        share, total = (torch.as_tensor(each).to(loss.device, dtype, non_blocking=True) for each in (share, total))
        return torch.where(share > 0, loss, 0.0) * (share * num_ranks / total).to(loss.dtype)
    if not share:
        return torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0 if total else float("nan"))
    return loss * (share * num_ranks / total)
