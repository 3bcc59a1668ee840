"""What the loss of a run is: declared, proved by a micro-batch, or else treated as transformers does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hftrain.checkpoint.participants import InManifest
from hftrain.core.log import get_logger
from hftrain.strategies.base import Strategy
from hftrain.task.introspect import takes_item_count
from hftrain.task.items import LABELS, SAMPLES, SHIFTED, SUM
from hftrain.task.model_task import ModelTask
from hftrain.trainer.proofs import COUNTED, PLAIN, WHATS, Call, Finding, Watch, findings

logger = get_logger(__name__)

MEANS = (LABELS, SHIFTED, SAMPLES)
# A mean over the items that `count_items` counts, and transformers' treatments of a loss of which nothing is declared:
# use it as it is, or average it over micro-batches.
ITEMS, AS_IS, ALIKE = Finding("items"), Finding("as is"), Finding("alike")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossHooks:
    """The parts of a Trainer that affect the loss of a step.

    Args:
        owner: The name of the Trainer's class.
        compute_loss_func: The Trainer's argument: None, a function, or another library's marker.
        is_overridden: Returns whether the user's class overrides a hook.
        accepts_count: The documented `model_accepts_loss_kwargs`.
        is_declared: Whether the user's class has set that attribute.
        is_scaled: The documented `loss_is_scaled_for_ga`, None if it is not set.
        loss_takes_count: Whether `compute_loss` takes the count; in its older form it does not.
        shifts_labels: The attribute `_loss_shifts_labels` of transformers' Trainer.
    """

    owner: str
    compute_loss_func: Any
    is_overridden: Callable[[str], bool]
    accepts_count: bool
    is_declared: bool
    is_scaled: bool | None
    loss_takes_count: bool
    shifts_labels: bool
    get_batch_samples: Callable[..., Any]

    @property
    def is_plain(self) -> bool:
        """Whether the model's loss is used: no user code computes one."""
        return self.compute_loss_func is None and not self.is_overridden("compute_loss")

    @property
    def function_takes_count(self) -> bool:
        """Whether the loss function, or another library's marker for one, is given the count."""
        return not callable(self.compute_loss_func) or takes_item_count(self.compute_loss_func)

    @property
    def takes_count(self) -> bool:
        """Whether transformers counts items: for a model that accepts the count, or for a loss function."""
        return self.accepts_count or self.compute_loss_func is not None

    def followed(self, *, has_count: bool) -> Finding:
        """Return how transformers treats the loss."""
        if self.is_scaled is not None:
            return AS_IS if self.is_scaled else ALIKE
        is_given = has_count if self.compute_loss_func is None else self.function_takes_count
        return AS_IS if is_given and self.takes_count and self.loss_takes_count else ALIKE


def declared(hooks: LossHooks, task: ModelTask | None) -> Finding | None:
    """Return what is declared of a loss, None if nothing is."""
    if task is None or task.count_rule is not None:
        return ITEMS
    # Other libraries set a marker in place of a function, and divide the loss themselves.
    is_marked = hooks.compute_loss_func is not None and not callable(hooks.compute_loss_func)
    if hooks.is_scaled is not None or is_marked:
        return hooks.followed(has_count=True)
    if hooks.is_declared and not hooks.takes_count:
        return ALIKE
    return Finding(COUNTED, is_scaled=True) if hooks.is_plain and task.label_smoothing else None


def _is_alike(findings: list[Finding]) -> bool:
    """Return whether a loss is a plain mean in any case, only over unknown items."""
    return all(each.what in (*MEANS, SUM, PLAIN) and each.is_scaled == findings[0].is_scaled for each in findings)


def _is_equal(weights: list[float]) -> bool:
    return not weights or max(weights) - min(weights) <= 1e-9 * max(weights)


_OF_MESHES = (
    " If it is multiplied by accelerator.num_processes to undo the mean over them, multiply it by "
    "strategy.data.world_size: the other processes of the mesh compute the same loss."
)


class LossFinding:
    """Find out what a plain model's loss is, on all processes alike.

    Args:
        watch: Observes the model; None for a loss that is declared.
        num_ranks: Over which items are counted; 1 if each rank averages over its own.

    Attributes:
        finding: What the loss is; None until it is proved, or if it cannot be.
        is_open: Whether a proof is sought, or checked: what holds for some batches may not hold for others.
    """

    def __init__(
        self, hooks: LossHooks, task: ModelTask | None, strategy: Strategy, watch: Watch | None, *, num_ranks: int
    ) -> None:
        self._hooks, self._task, self._strategy, self.watch = hooks, task, strategy, watch
        self._num_ranks = num_ranks
        self.finding = declared(hooks, task)
        self.is_declared = self.finding is not None
        self.is_open = not self.is_declared
        # A model that accepts the count is taken to divide by it, unless it turns out not to read it.
        self._is_given = self.is_open and hooks.is_plain and hooks.accepts_count
        if self._is_given:
            self.finding = Finding(COUNTED, is_scaled=True)
        self._num_looks = 0
        # What it can still be after all looks; None before the first.
        self._left: list[Finding] | None = None
        self._is_restored = self._has_warned = False

    @property
    def candidates(self) -> list[Finding]:
        """What the loss can still be, without the model's plain mean if that is known under another name too."""
        left = self._left or []
        return [each for each in left if each.what != PLAIN] or left

    def is_scheduled(self) -> bool:
        """Return whether the next step is looked at in any case: ever more rarely, because it reads from the device."""
        if not self.is_open:
            return self._is_restored
        self._num_looks += 1
        is_new = self._left is None and self._num_looks <= 8
        return self._is_restored or is_new or not self._num_looks & (self._num_looks - 1)

    def is_decisive(self, weight: Callable[[Finding], float]) -> bool:
        """Return whether a micro-batch has different weights by what its loss can still be; collective.

        It is then looked at, too.
        """
        candidates = self.candidates
        if not self.is_open or len(candidates) < 2:
            return False
        if self._strategy.world_size > 1 and self._strategy.device.type != "cpu":
            return False  # to agree in each step would wait for the device
        return not self._strategy.all_true(_is_equal([weight(each) for each in candidates]))

    def look(
        self,
        loss: torch.Tensor,
        counts: Mapping[str, Any],
        total: Any,
        weight: Callable[[Finding], float],
        *,
        num_micro_batches: int,
        is_uneven: bool,
    ) -> bool:
        """Try to prove what a micro-batch's loss is; collective.

        Args:
            counts: The numbers of items in the micro-batch.
            total: The item count of the step, or None.
            weight: Returns the weight that the micro-batch has if its loss is a finding.
            is_uneven: Whether samples or micro-batches hold unequal numbers of items.

        Returns:
            Whether the loss could tell anything, on any process.
        """
        assert self.watch is not None
        is_own = self.watch.own_loss is loss
        calls = self.watch.close()
        found = self._known(total) if is_own else None
        if found is None and not self.watch.is_elsewhere:
            found = self._found(loss, calls, counts, total, num_micro_batches)
        agreed, is_uneven = self._agreed(found, is_uneven=is_uneven)
        if agreed is None:
            return False
        if self._is_restored and not any(each in self.candidates for each in agreed):
            self._left, self.is_open = None, True
            if self._strategy.is_main:
                logger.warning("The loss is not that of the checkpoint: batches may be weighted differently from here.")
        self._is_restored = False
        if self.is_open:
            self._decide(agreed, weight, has_count=total is not None, is_uneven=is_uneven)
        return True

    def _known(self, total: Any) -> set[Finding] | None:
        """Return what the documented compute_loss returns if hftrain computes it; None if the model does."""
        task = self._task
        if task is None or not task.label_smoothing or task.compute_loss_func is not None:
            return None
        kind = SHIFTED if task.is_causal else LABELS
        return {Finding(kind) if total is None else Finding(COUNTED, is_scaled=self._num_ranks > 1)}

    def _found(
        self, loss: torch.Tensor, calls: Sequence[Call], counts: Mapping[str, Any], total: Any, num_micro_batches: int
    ) -> set[Finding] | None:
        is_given = self._is_given and total is not None
        given = {Finding(COUNTED, is_scaled=self._num_ranks > 1)}
        if is_given and calls and all(call.is_read for call in calls):
            return given
        found = findings(
            loss,
            calls,
            counts=counts,
            total=None if total is None else float(total),
            scales=self.scales(has_count=total is not None),
            num_micro_batches=num_micro_batches,
        )
        if found is None:
            return None
        return {finding for finding, _ in found} or (given if is_given else set())

    def scales(self, *, has_count: bool) -> dict[bool, int]:
        """Return what the loss may have been multiplied by to undo the mean over ranks, by `Finding.is_scaled`.

        The documented compute_loss does so with a loss that is given a count; an override may do as it likes.
        """
        if self._num_ranks == 1:
            return {False: 1}
        if self._hooks.is_overridden("compute_loss"):
            return {False: 1, True: self._num_ranks}
        is_scaled = has_count and self._task is not None and self._task.divides_by_count
        return {is_scaled: self._num_ranks if is_scaled else 1}

    def _agreed(self, found: set[Finding] | None, *, is_uneven: bool) -> tuple[list[Finding] | None, bool]:
        """Return what the loss can be on every process, the likeliest first, or None if none can tell. Collective."""
        scales = (False, True) if self._num_ranks > 1 else (False,)
        every = [Finding(what, is_scaled) for what in WHATS for is_scaled in scales]
        missing = [int(found is not None and each not in found) for each in every]
        flags: list[int] = [*missing, int(found is not None), int(is_uneven)]
        if self._strategy.world_size > 1:
            flags = self._strategy.reduce(torch.tensor(flags, device=self._strategy.device), op="max").tolist()
        *missing, is_told, differs = flags
        left = [each for each, is_gone in zip(every, missing, strict=True) if not is_gone]
        return left if is_told else None, bool(differs)

    def _decide(
        self, found: list[Finding], weight: Callable[[Finding], float], *, has_count: bool, is_uneven: bool
    ) -> None:
        """Decide, if the batch tells, and go on looking if it does not; collective."""
        was_proved = bool(self._left)
        self._left = [each for each in found if self._left is None or each in self._left]
        left = self.candidates
        if not left or left[0].what == PLAIN:
            self.finding = left[0] if left else None
            is_used = not left and self._hooks.followed(has_count=has_count) is AS_IS
            # A plain mean of a model that accepts the count has no proof but that nothing was seen to read it.
            if is_used or is_uneven or (was_proved and not left) or (left and self._is_given):
                self._warn_of_following(is_used=is_used)
            return
        if len(left) > 1 and not self._strategy.all_true(_is_equal([weight(each) for each in left])):
            if not _is_alike(left):
                self.finding = None
                self._warn_of_following(is_used=self._hooks.followed(has_count=has_count) is AS_IS)
                return
            self._warn_of_ambiguity(left[0])
        self.finding = left[0]
        self.is_open = not (self._is_given and left == [Finding(COUNTED, left[0].is_scaled)])

    def follow(self, *, has_count: bool) -> Finding:
        """Return how transformers treats a loss whose batch is another than the one that was counted; warn."""
        self._warn_of_following(is_used=self._hooks.followed(has_count=has_count) is AS_IS)
        return Finding(PLAIN, self.finding.is_scaled) if self.finding is not None else ALIKE

    # -- warnings --------------------------------------------------------------------------------------------------

    @property
    def _maker(self) -> str:
        if self._hooks.is_overridden("compute_loss"):
            return f"{self._hooks.owner}.compute_loss"
        if self._hooks.compute_loss_func is not None:
            return "compute_loss_func"
        return "" if self._task is None else type(self._strategy.unwrap(self._task.model)).__name__

    def warn(self, message: str, *values: Any) -> None:
        """Log a warning about the loss, one in all."""
        if not self._has_warned and self._strategy.is_main:
            logger.warning(message, *values)
        self._has_warned = True

    def _warn_of_ambiguity(self, first: Finding) -> None:
        self.warn(
            "The loss of %s is the mean over %s, and in the batches seen so far the mean over samples is the same "
            "number. It is weighted by their number, which differs between batches. If it is the mean over samples, "
            'pass count_items="samples" to the Trainer; count_items="%s" keeps this without a warning.',
            self._maker,
            first.what.replace("_", " "),
            first.what,
        )

    def _warn_of_following(self, *, is_used: bool) -> None:
        self.warn(
            "Cannot prove what the loss of %s is a mean over. As in transformers it is %s, and averaged over "
            "processes. If it is already divided for the whole step, set loss_is_scaled_for_ga = True in the "
            "Trainer's class, or "
            'False if it is the mean over a micro-batch; or pass count_items= to the Trainer ("labels", "samples", or '
            "a function of the batch) to weight it by these items.%s",
            self._maker,
            "used as it is" if is_used else "divided by the number of micro-batches",
            _OF_MESHES if self._strategy.data.world_size < self._strategy.world_size else "",
        )

    def warn_of_evaluation(self, kinds: list[str], *, is_counted: bool) -> None:
        """Warn if the means of an evaluation whose samples hold unequal numbers of labels are not proved."""
        if len(kinds) > 1:
            self._warn_of_ambiguity(Finding(kinds[0]))
        elif not kinds and not is_counted:
            self.warn(
                "Cannot prove what the loss of %s is a mean over. As in transformers, eval_loss weights batches by "
                "their samples, so it depends on the batch size. Pass count_items= to the Trainer to choose the "
                "weights; "
                'count_items="samples" keeps these without a warning.',
                self._maker,
            )

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def fact(self) -> InManifest:
        """What a checkpoint's manifest records, so that a resumed run weights batches as the uninterrupted one."""
        name = "loss_finding"
        return InManifest(lambda: {name: self.state_dict()}, lambda facts: self.load_state_dict(facts.get(name)))

    def state_dict(self) -> dict[str, Any] | None:
        """Return what was proved, in plain values; None if the loss is declared."""
        if self.is_declared:
            return None
        left = None if self._left is None else [list(each) for each in self._left]
        finding = None if self.finding is None else list(self.finding)
        return {"finding": finding, "left": left, "is_open": self.is_open, "num_looks": self._num_looks}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue with what was proved; the first step checks it, because the loss may have been changed since."""
        if state is None or self.is_declared:
            return
        self.finding = None if state["finding"] is None else Finding(*state["finding"])
        self._left = None if state["left"] is None else [Finding(*each) for each in state["left"]]
        self.is_open, self._num_looks = bool(state["is_open"]), int(state["num_looks"])
        self._is_restored = self.finding is not None
