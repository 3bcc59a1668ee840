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
from hftrain.checkpoint.registry import Entry, Scope
from hftrain.core.errors import TaskError
from hftrain.core.log import get_logger
from hftrain.core.preserve import temporarily
from hftrain.core.tree import batch_size_of
from hftrain.strategies.base import Strategy
from hftrain.task.introspect import takes_item_count
from hftrain.task.items import LABELS, SAMPLES, SHIFTED, known_count
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule, checked_count
from hftrain.trainer.loss_kinds import COUNTED, EVERY_KIND, MEANS, PLAIN, TRUSTED, WEIGHTED, LossKind, LossWatch

Count = int | torch.Tensor
Counts = Mapping[str, Any]

logger = get_logger(__name__)

# A mean over what `count_items` counts, and transformers' treatments of a loss of an unknown kind: use it as it is,
# trusting that it is divided by the item count and scaled, or average it over micro-batches.
ITEMS, AS_IS, ALIKE = LossKind("items"), LossKind(TRUSTED, is_scaled=True), LossKind(PLAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossHooks:
    """The parts of a Trainer that affect the loss of a step."""

    maker: str  # what computes the loss, in messages
    compute_loss_func: Any  # None, a function, or another library's marker for one
    overrides_loss: bool  # the class overrides compute_loss
    accepts_count: bool  # the documented model_accepts_loss_kwargs
    is_declared: bool  # the class, or its user, has set that
    is_trusted: bool  # the model declares that it divides by the count, or is one of transformers' decoders
    is_scaled: bool | None  # the documented loss_is_scaled_for_ga, if it is set
    loss_takes_count: bool  # compute_loss takes the count; in its older form it does not
    shifts_labels: bool  # the attribute _loss_shifts_labels of transformers' Trainer
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
    """What a loss is.

    Attributes:
        kind: None as long as nothing is known, and if no kind was recognised.
        candidates: What the loss can still be, the likeliest first.
        is_settled: Whether no further batch is looked at.
        watch: Observes a plain model.
        has_warned: Whether its one warning has been given, or is not needed.
    """

    def __init__(self, hooks: LossHooks, task: ModelTask | None, strategy: Strategy, watch: LossWatch | None) -> None:
        self.hooks, self.strategy, self.watch = hooks, strategy, watch
        self.kind, self.candidates = hooks.declared(task), list[LossKind]()
        self.is_declared = self.is_settled = self.has_warned = self.kind is not None

    def inherit(self, other: LossRule) -> None:
        """Take over what another rule of the same Trainer knows."""
        self.has_warned |= other.has_warned
        if self.hooks.maker == other.hooks.maker and not (self.is_declared or other.is_declared):
            self.candidates, self.kind, self.is_settled = other.candidates, other.kind, other.is_settled

    def narrow(self, found: set[LossKind] | None) -> None:
        """Exclude what a loss cannot be by one batch; None excludes nothing."""
        if found is not None:
            left = [each for each in self.candidates or EVERY_KIND if each in found]
            self.candidates = [each for each in left if each.what not in (TRUSTED, PLAIN)] or left
            self.kind, self.is_settled = next(iter(self.candidates), None), len(self.candidates) < 2

    def agree(self, found: set[LossKind] | None) -> bool:
        """Exclude what a batch excludes on any process; return whether it told anything. Collective."""
        missing = [int(found is not None and each not in found) for each in EVERY_KIND]
        flags = torch.tensor([*missing, int(found is not None)], device=self.strategy.device)
        *missing, is_told = self.strategy.reduce(flags, op="max").tolist()
        if is_told:
            self.narrow({each for each, is_missing in zip(EVERY_KIND, missing, strict=True) if not is_missing})
        return bool(is_told)

    def warn(self, treatment: str, *, is_ambiguous: bool = False) -> None:
        """Log the one warning about a loss, of an unknown kind or of several possible ones."""
        if not self.has_warned and self.strategy.is_main:
            unknown = "which of several equal means it is" if is_ambiguous else "what it is a mean over"
            logger.warning(
                f"Cannot prove of the loss of {self.hooks.maker} {unknown}. {treatment}. To choose the weights of "
                'batches, pass count_items="labels", "samples" or a function of the batch to the Trainer; or set '
                "loss_is_scaled_for_ga in its class: True if the loss is divided for the whole step already, False if "
                "it is the mean over a micro-batch."
            )
        self.has_warned = True

    @property
    def entry(self) -> Entry:
        """What a checkpoint's manifest records, so that a resumed run weights batches as the uninterrupted one."""

        def state() -> dict[str, Any]:
            is_known = not self.is_declared and (self.is_settled or self.candidates)
            return {
                "loss_finding": {"left": list(map(list, self.candidates)), "of": self.hooks.maker} if is_known else None
            }

        def load(facts: Mapping[str, Any]) -> None:
            found = facts.get("loss_finding")
            if found is None or found.get("left") is None or self.is_declared:
                return
            if found.get("of", self.hooks.maker) == self.hooks.maker:
                self.candidates = []
                self.narrow({LossKind(*each) for each in found["left"]})
            else:
                logger.warning("The loss is not that of the checkpoint but that of %s.", self.hooks.maker)

        return Entry(Scope.MANIFEST, state, load)


class LossShares:
    """Count the items of a step, and multiply each micro-batch's loss by its share of them.

    Attributes:
        rule: What the loss is.
        has_weighed: Whether a loss was weighted here; False if a user's step does not call the documented one.
    """

    def __init__(self, args: TrainingArguments, strategy: Strategy, task: TaskModule, hooks: LossHooks) -> None:
        self._data, self._task, self.hooks = strategy.data, task, hooks
        self._accumulates = args.gradient_accumulation_steps > 1
        self.num_micro_batches = args.gradient_accumulation_steps  # of the current step
        self.num_ranks = strategy.data.world_size if args.average_tokens_across_devices else 1
        # Where a compute_loss that is copied from elsewhere may be too large.
        self._is_mesh = hooks.overrides_loss and self._data.world_size < strategy.world_size
        self.is_on = self._accumulates or self.num_ranks > 1 or self._is_mesh
        self.plain = task if isinstance(task, ModelTask) else None
        if self.plain is not None:
            self.plain.accepts_item_count = hooks.accepts_count
        watch = None if self.plain is None else LossWatch(self.plain, strategy, self.num_ranks)
        self.rule = LossRule(hooks, self.plain, strategy, watch)
        self.has_weighed = self._is_paused = self._is_looking = False
        self._num_whole = self._num_untold = 0
        self._sizes: set[Any] = set()
        self._counted: dict[int, tuple[Any, Counts]] = {}
        self._totals: dict[str, Any] | None = None
        self._num_given: Any = 1  # labels in the step, as the model was told
        self._wait: Callable[[], Any] | None = None

    def take(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Count | None]:
        """Take a step's micro-batches and count their items."""
        self._totals, self._counted, self._is_looking, self._num_given = None, {}, False, 1
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
                self._num_given = 1
            if self.plain is None:
                # The user's count, if any, is the total; a plain model's loss may be divided by it.
                self._totals = {} if num_items is not None else self._totals
            elif not self.rule.is_settled:
                # Which of the possible kinds it is matters where they weight a micro-batch differently.
                shares = [share for _, share in self._counted.values()]
                is_same = bool(self.rule.candidates) and not any(self._differ(each, num_items) for each in shares)
                self._is_looking = not self.rule.strategy.all_true(is_same)
        return batches, num_items

    def count(self, batches: list[Any], device: torch.device | None) -> Count | None:
        """Return the item count of a step, over all ranks if the arguments ask for it; None if unused. Collective."""
        given: Any = self._given(batches) if batches else None
        if not batches or not self.is_on:
            return given  # type: ignore[no-any-return]
        kinds = self._kinds()
        counts = [self._count_kinds(batch, kinds) for batch in batches]
        self._counted = {id(batch): (batch, each) for batch, each in zip(batches, counts, strict=True)}
        totals = [sum(each[kind] for each in counts) for kind in kinds] + [given] * (given is not None)
        if self.num_ranks > 1 and totals:
            # It moves the counts to the device without waiting.
            summed, self._wait = self._data.reduce_later(
                torch.stack([torch.as_tensor(each).squeeze() for each in totals])
            )
            totals = list(summed)
        self._totals = dict(zip(kinds, totals, strict=False))
        if given is None:
            # Not read before the loss is weighted, so the reduction and the forward pass overlap.
            return totals[0] if self.plain is None else None
        self._end_wait()
        # The loss of a step without labels is shown as NaN, but no 0 / 0 reaches its gradient.
        self._num_given = known_count(totals[-1])
        return totals[-1].clamp(min=1)  # type: ignore[no-any-return]

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None

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
            # An override trains on batches of unknown size in transformers, too.
            unknown = None if self.hooks.is_plain and self._accumulates else 1
            return {kind: known_count(plain.count_as(kind, batch, unknown=unknown)) for kind in kinds} if plain else {}
        is_countable = plain is not None or type(task).count_items is not TaskModule.count_items
        if is_countable or self._accumulates or batch_size_of(batch) is not None:
            return {ITEMS.what: known_count(checked_count(task.count_items(batch), task.count_items))}
        return {ITEMS.what: 1}  # one per batch, as DDP weights it

    def count_for_evaluation(self, batch: Any) -> Count | None:
        """Return the count to pass to the loss of an evaluation batch, or None."""
        return self._given([batch])  # type: ignore[no-any-return]

    def share_of(self, batch: Any) -> Counts:
        """Return the counts of a micro-batch; empty if a hook has put other items in it than those counted before."""
        counted = self._counted.get(id(batch))
        if counted is not None and counted[0] is batch:
            return counted[1]
        counts = self._count_kinds(batch, self._kinds())
        if self._num_whole:
            return {**counts, "part": self._num_samples(batch) / self._num_whole}
        is_sure = self.rule.kind is ITEMS
        return counts if is_sure or any(counts.items() <= each.items() for _, each in self._counted.values()) else {}

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
        self._end_wait()
        if self._is_looking and not self._is_paused and self.rule.watch is not None:
            # A loss that is NaN, because the batch has no labels, tells nothing: the next one may.
            self._is_looking = not self.rule.agree(self.rule.watch.recognise(loss, share, num_items))
            self._num_untold += self._is_looking
            empty = [kind for kind in (LABELS, SHIFTED) if not share.get(kind, 1)]
            if self._is_looking and empty and not bool(torch.isfinite(loss)):
                return _scaled(loss, 0, 1, self._total(empty[0], num_items))
        kind = self.rule.kind or self.hooks.followed(has_count=num_items is not None)
        if kind.what in MEANS and kind.what not in share:
            kind = LossKind(PLAIN, kind.is_scaled)
        if not self.rule.has_warned and (not self.rule.is_settled or kind.what in (TRUSTED, PLAIN)):
            self._warn(kind, share, num_items)
        if kind.what in share:
            num_ranks = 1 if kind.is_scaled else self.num_ranks
            return _scaled(loss, share[kind.what], num_ranks, self._total(kind.what, num_items))
        factor, total = self._weight(kind, share, num_items), self._num_given
        weighed = loss if factor == 1 else loss * factor
        is_divided = kind.what == COUNTED or (kind.what == TRUSTED and self.hooks.is_plain)
        if is_divided and (isinstance(total, torch.Tensor) or not total):
            weighed = weighed + 0.0 / torch.as_tensor(total, device=loss.device)
        return weighed

    def weighing(self, batch: Any, num_items: Count | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that multiplies losses of a micro-batch by its share of the step."""
        return partial(self.weigh, share=self.share_of(batch), num_items=num_items) if self.is_on else lambda loss: loss

    def _total(self, what: str, num_items: Count | None) -> Any:
        return num_items if self._totals is None else self._totals.get(what, num_items)

    def _weight(self, kind: LossKind, share: Counts, num_items: Count | None) -> Any:
        """Return the factor of a loss of a kind."""
        num_ranks = 1 if kind.is_scaled else self.num_ranks
        if kind.what in share:
            return share[kind.what] * num_ranks / max(float(self._total(kind.what, num_items)), 1.0)
        if kind.what in (COUNTED, TRUSTED):
            return num_ranks
        return share.get("part", 1) / self.num_micro_batches * num_ranks / self.num_ranks

    def _differ(self, share: Counts, num_items: Count | None, without: str = "") -> bool:
        """Return whether the possible kinds give a micro-batch different weights."""
        weights = [float(self._weight(each, share, num_items)) for each in self.rule.candidates if each.what != without]
        return max(weights) - min(weights) > 1e-9 * max(weights)

    def _warn(self, kind: LossKind, share: Counts, num_items: Count | None) -> None:
        """Warn of a loss of an unknown kind, or of several possible ones, if that can matter."""
        # What is on a device is not read for this.
        numbers = (share.get(LABELS), share.get(SAMPLES), share.get("part"), known_count(self._total(LABELS, None)))
        own, *others, total = (None if isinstance(each, torch.Tensor) else each for each in numbers)
        self._sizes.add((own, *others))
        hooks, count = self.hooks, self.num_micro_batches * round(1 / share.get("part", 1))
        is_even = len(self._sizes) < 2 and share and (not own or not total or own * count * self.num_ranks == total)
        if not self.rule.is_settled and (self.rule.candidates or self._num_untold < 4):
            if self.rule.candidates and share and self._differ(share, num_items, without=WEIGHTED):
                by = kind.what.replace("_", " ")
                self.rule.warn(f"It is weighted by its {by}, which differ between batches", is_ambiguous=True)
        elif kind.what == TRUSTED and (hooks.is_declared or (hooks.is_trusted and self.rule.kind)):
            self.rule.has_warned = True  # there is nothing to warn of
        elif self._is_mesh and self.rule.kind is None:
            self.rule.warn("Multiply it by strategy.data.world_size at most: some processes of the mesh share samples")
        elif kind.what == TRUSTED:
            factor = count if hooks.overrides_loss else count * self.num_ranks
            self.rule.warn(
                "As in transformers, it is used as it is, for the item count of the step may have divided it: if not, "
                f"with {count} micro-batches and {self.num_ranks} process(es) it is {factor} times a mean"
            )
        elif kind.what == PLAIN and not is_even and count * self.num_ranks > 1:
            self.rule.warn("It is averaged over micro-batches and processes, whatever they hold")

    def is_weighed(self, num_items: Count | None) -> bool:
        """Return whether a step's losses were weighted, here or by the model, which divides by the item count."""
        return self.has_weighed or (num_items is not None and self.plain is not None and self.plain.gives_count)


def _scaled(loss: torch.Tensor, share: Any, num_ranks: int, total: Any) -> torch.Tensor:
    """Return a mean loss scaled to its share of the mean over a step's items.

    The mean over no items (NaN) has share 0, and a step without items the loss NaN; both have the gradient 0.
    """
    total = known_count(total)
    if isinstance(total, torch.Tensor) or isinstance(share, torch.Tensor):
        # At least float32: 16 bits are too few for the count.
        dtype = torch.promote_types(loss.dtype, torch.float32)
        share, total = (torch.as_tensor(each).to(loss.device, dtype, non_blocking=True) for each in (share, total))
        factor: torch.Tensor = (share * num_ranks / total).to(loss.dtype)
        return torch.where(share > 0, loss, 0.0) * factor
    if not share:
        return torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0 if total else float("nan"))
    return loss * float(share * num_ranks / total)
