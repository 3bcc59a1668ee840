"""What a loss is: a mean over labels or samples, a sum, or a sum divided by a count. It is, in this order:

1. declared, and obeyed (`LossHooks.declared`);
2. recognised by its value (`LossWatch`) in the first batch that can tell, for the whole run. No user code is called for
   it: the outputs and labels of a normal step give the value that each kind of loss would have, and a loss that equals
   one of them to rounding is of that kind. Kinds that give the same value stay possible until a batch tells them apart;
   a kind that was excluded does not come back (`LossRule`);
3. followed: treated as transformers does (`LossHooks.followed`), with one warning if that can matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from hftrain.checkpoint.state_files import Entry, Scope
from hftrain.core.errors import TaskError
from hftrain.core.log import get_logger, warn_once
from hftrain.core.tree import tensors_of
from hftrain.core.types import StepOutput
from hftrain.strategies.base import Strategy
from hftrain.task.introspect import forward_parameters, takes_item_count
from hftrain.task.items import IGNORED_LABEL, LABELS, OWN_ITEMS, SAMPLES, SHIFTED, SUM
from hftrain.task.model_call import ModelCall
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule

logger = get_logger(__name__)

MEANS = (LABELS, SHIFTED, SAMPLES)
# A sum divided by the item count that the step was given; a mean with a weight for each class, which labels of a single
# class or items with equal losses do not show; a model's own loss of an unknown kind, which was given the count, as
# transformers trusts, or was not.
COUNTED, WEIGHTED, TRUSTED, UNKNOWN = "counted", "weighted", "trusted", "plain"  # as checkpoints hold them

# How far equal losses may be apart, by dtype: sums are taken in another order, and 16 bits are rough.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_MOST_ELEMENTS = 1 << 24  # of the logits that are cast at once


class LossKind(NamedTuple):
    """What a loss is, and whether it was multiplied by the number of ranks, to undo the mean over them."""

    what: str
    times_ranks: bool = False


# The likeliest first.
EVERY_KIND = [
    LossKind(what, times_ranks)
    for what in (*MEANS, SUM, COUNTED, WEIGHTED, TRUSTED, UNKNOWN)
    for times_ranks in (False, True)
]


# A mean over what `count_items` counts, and transformers' treatments of a loss of an unknown kind: use it as it is,
# trusting that it is divided by the item count and multiplied by the ranks, or average it over micro-batches.
ITEMS, AS_IS = LossKind(OWN_ITEMS), LossKind(TRUSTED, times_ranks=True)
MICRO_BATCH_MEAN = LossKind(UNKNOWN)


class Call(NamedTuple):
    """A call of the model: its loss, before user code could change it in place, its logits, and the labels it got."""

    loss: float | None
    logits: torch.Tensor | None
    labels: Any
    takes_count: bool


class LossWatch:
    """Observe the calls of a plain model while one loss is computed, and recognise the loss."""

    def __init__(self, task: ModelTask, strategy: Strategy, num_counted_ranks: int) -> None:
        self._task, self._strategy, self._num_counted_ranks = task, strategy, num_counted_ranks
        self.model = self._called = strategy.unwrap(task.model)
        self._calls: list[Call] = []
        self._labels: torch.Tensor | None = None
        self._times_ranks: bool | None = None  # by the documented compute_loss; None if the loss does not come from it

    def open(self, batch: Any) -> None:
        """Start to observe. Labels are taken now, because a loss may take them away from the batch."""
        self._labels, self._calls, self._times_ranks = self._task.label_tensor(batch), [], None
        self._called = self._strategy.called(self.model)
        ModelCall.of(self._called).set(observe=self._see)

    def close(self) -> list[Call]:
        """Stop observing, and return the calls; safe to call twice."""
        ModelCall.of(self._called).set(observe=None)
        calls, self._calls, self._labels = self._calls, [], None
        return calls

    def undo_mean(self, loss: torch.Tensor, num_items: Any) -> torch.Tensor:
        """Multiply a loss divided by all ranks' count by their number, as documented; an evaluation takes no mean."""
        self._times_ranks = num_items is not None and self._task.divides_by_count and torch.is_grad_enabled()
        return loss * self._num_counted_ranks if self._times_ranks else loss

    def _see(self, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        tensors = [each for each in tensors_of(outputs) if not hasattr(each, "to_local")]
        if not self._strategy.has_outputs(self.model) or not all(map(_has_memory, tensors)):
            return  # what a transform of torch.func passes has no values of its own
        named = {**dict(zip(forward_parameters(self.model), args, strict=False)), **kwargs}
        if not isinstance(outputs, Mapping):
            values = outputs if isinstance(outputs, (list, tuple)) else [outputs]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            outputs = {"logits" if tensor.dim() else "loss": tensor for tensor in reversed(tensors)}
        loss, logits, labels = outputs.get("loss"), outputs.get("logits"), self._task.label_tensor(named)
        number = float(loss.detach()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
        logits = logits.detach() if isinstance(logits, torch.Tensor) else None
        takes_count = named.get("num_items_in_batch") is not None
        self._calls.append(Call(number, logits, self._labels if labels is None else labels, takes_count))

    def recognise(self, loss: torch.Tensor, counts: Mapping[str, Any], total: Any) -> set[LossKind] | None:
        """Stop observing, and return all that a loss can be by its value; None if it cannot tell anything.

        Args:
            counts: The batch's numbers of items; a mean over other numbers of them cannot be weighted.
            total: The item count that the loss may have been divided by, or None.
        """
        calls, value, tolerance = self.close(), float(loss.detach()), TOLERANCES.get(loss.dtype, 3e-2)
        # A small loss is the difference of larger numbers, whose rounding it has: of the largest logits of items.
        logits = [call.logits for call in calls if call.logits is not None and call.logits.numel()]
        largest = [float(each.amax(-1).nan_to_num(0.0, 0.0, 0.0).abs().max()) for each in logits]
        tolerance = max([tolerance, *(TOLERANCES[torch.float32] for each in logits if each.dtype != torch.float64)])
        least = tolerance / 20 * max([0.0, *largest])
        # The last stage of a pipeline sees what the model returns.
        if not math.isfinite(value) or abs(value) <= 2 * least or self._strategy.has_outputs(self.model) is None:
            return None
        is_close = partial(math.isclose, rel_tol=tolerance, abs_tol=least)
        smoothed = self._task.label_smoothing if self._task.compute_loss_func is None else 0.0
        values = [
            each
            for call in calls
            for smoothing in {0.0, smoothed}
            for each in _values(call, counts, total, smoothing, is_close)
        ]
        scales = {1, self._num_counted_ranks}
        found = {LossKind(what, num > 1) for each, what in values for num in scales if is_close(value, each * num)}
        # The sum over as many items as there are ranks equals their mean times the ranks.
        return {each for each in found if each.times_ranks is self._times_ranks} or found


def _values(
    call: Call, counts: Mapping[str, Any], total: Any, smoothing: float, is_close: Callable[..., bool]
) -> Iterator[tuple[float, str]]:
    """Yield the values that a loss could have after a call of the model, each with what it then is."""
    means = list(means_of(call.logits, call.labels, smoothing))
    yield from ((mean, kind) for kind, mean, num in means if kind not in MEANS or num == counts.get(kind))
    counted = [mean * num / float(total) for kind, mean, num in means if total and kind in (LABELS, SHIFTED)]
    yield from ((each, COUNTED) for each in counted)
    if call.loss is not None:
        is_unknown = call.takes_count and not any(is_close(call.loss, mean) for _, mean, _ in means)
        if not (is_unknown and any(is_close(call.loss, each) for each in counted)):
            yield call.loss, TRUSTED if is_unknown else UNKNOWN


def means_of(logits: torch.Tensor | None, labels: Any, smoothing: float = 0.0) -> Iterator[tuple[str, float, int]]:
    """Yield each kind of mean of a model's outputs: the kind, the loss, and the number of items.

    The losses are the cross-entropy for class labels, the squared error and the binary cross-entropy for others.
    """
    if not isinstance(labels, torch.Tensor) or logits is None or not logits.is_floating_point():
        return
    with torch.no_grad():
        if labels.is_floating_point() or labels.dtype == torch.bool:
            if logits.numel() == labels.numel():
                targets = labels.reshape(logits.shape).to(logits)
                yield LABELS, float(mse_loss(logits, targets)), labels.numel()
                yield LABELS, float(binary_cross_entropy_with_logits(logits, targets)), labels.numel()
            return
        for kind, scores, classes in _layouts(logits, labels.to(logits.device)):
            sums, counts, is_flat = _sums(scores, classes, smoothing)
            if not (num := int(counts.sum())):
                continue
            yield kind, float(sums.sum()) / num, num
            yield SUM, float(sums.sum()), num
            if is_flat or bool((classes[classes != IGNORED_LABEL].diff() == 0).all()):
                yield WEIGHTED, float(sums.sum()) / num, num
            if labels.dim() > 1:  # otherwise a sample has one label, and its mean is that label's
                yield SAMPLES, float((sums / counts.clamp(min=1)).mean()), len(labels)


def _layouts(logits: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the ways in which logits and labels can belong together: kind, logits with the classes last, labels."""
    if logits.shape[:-1] == labels.shape:
        yield LABELS, logits, labels
        if labels.dim() > 1:
            yield SHIFTED, logits[..., :-1, :], labels[..., 1:]
    elif logits.dim() == labels.dim() + 1 and logits[:, :1].squeeze(1).shape == labels.shape:
        yield LABELS, logits.movedim(1, -1), labels


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _sums(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return each sample's sum of cross-entropies, its number of labels, and whether the losses of all items are equal.

    There are no labels if some are no classes.
    """
    num_classes, marks = logits.shape[-1], labels != IGNORED_LABEL
    counts = marks.reshape(len(labels), -1).sum(1).to("cpu", torch.float64)
    if bool((marks & ((labels < 0) | (labels >= num_classes))).any()):
        return counts * 0, counts * 0, False
    rows, dtype = max(1, _MOST_ELEMENTS // num_classes), torch.promote_types(logits.dtype, torch.float32)
    flat = zip(torch.split(logits.reshape(-1, num_classes), rows), torch.split(labels.reshape(-1), rows), strict=True)
    entropy = partial(cross_entropy, reduction="none", label_smoothing=smoothing)
    each = torch.cat([entropy(part.to(dtype), goal.long()) for part, goal in flat])
    least, largest = torch.aminmax(each[marks.reshape(-1)]) if bool(marks.any()) else (each.new_zeros(()),) * 2
    is_flat = bool(largest - least <= TOLERANCES[torch.float32] * largest)
    return each.to("cpu", torch.float64).reshape(len(labels), -1).sum(1), counts, is_flat


def row_sizes(labels: Any) -> set[tuple[int, ...]]:
    """Return the numbers of labels, and of shifted labels, that the samples of a batch hold; reads from the device."""
    if not isinstance(labels, torch.Tensor) or not labels.dim():
        return set()
    marks = (labels != IGNORED_LABEL).reshape(len(labels), -1)
    return set(map(tuple, torch.stack([marks.sum(1), marks[:, 1:].sum(1)], 1).tolist()))


@dataclass(frozen=True, kw_only=True, slots=True)
class LossHooks:
    """The parts of a Trainer that affect the loss of a step."""

    maker: str  # what computes the loss, in messages
    compute_loss_func: Any  # None, a function, or another library's marker for one
    overrides_loss: bool  # the class overrides compute_loss
    accepts_count: bool  # the documented model_accepts_loss_kwargs
    is_declared: bool  # the class, or its user, has set that
    is_trusted: bool  # the model declares that it divides by the count, or is one of transformers' decoders
    divided_for_step: bool | None  # the documented loss_is_scaled_for_ga, if it is set
    loss_takes_count: bool  # compute_loss takes the count; in its older form it does not
    shifts_labels: bool  # the attribute _loss_shifts_labels of transformers' Trainer
    get_batch_samples: Callable[..., Any]

    @property
    def uses_model_loss(self) -> bool:
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
        is_marker = self.compute_loss_func is not None and not callable(self.compute_loss_func)
        if self.divided_for_step is not None or is_marker:
            return self.followed(has_count=True)
        if self.is_declared and not self.takes_count:
            return MICRO_BATCH_MEAN
        return LossKind(task.smoothed_items) if self.uses_model_loss and task.label_smoothing else None

    def followed(self, *, has_count: bool) -> LossKind:
        """Return how transformers treats the loss."""
        if self.divided_for_step is not None:
            return AS_IS if self.divided_for_step else MICRO_BATCH_MEAN
        function = self.compute_loss_func
        is_given = has_count if function is None else not callable(function) or takes_item_count(function)
        return AS_IS if is_given and self.takes_count and self.loss_takes_count else MICRO_BATCH_MEAN


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
            self.candidates = [each for each in left if each.what not in (TRUSTED, UNKNOWN)] or left
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
            finding = {"left": list(map(list, self.candidates)), "of": self.hooks.maker}
            return {"loss_finding": finding if is_known else None}

        def load(facts: Mapping[str, Any]) -> None:
            found = facts.get("loss_finding")
            if found is None or found.get("left") is None or self.is_declared:
                return
            if found.get("of", self.hooks.maker) == self.hooks.maker:
                self.candidates, left = [], {LossKind(*each) for each in found["left"]}
                # One process does not tell whether a loss is multiplied by the ranks; the next batch will.
                is_single = self.strategy.data.world_size == 1
                self.narrow(left if is_single else left | {LossKind(what, times_ranks=True) for what, _ in left})
            else:
                logger.warning("The loss is not that of the checkpoint but that of %s.", self.hooks.maker)

        return Entry(Scope.MANIFEST, state, load)


class CountItemsCheck:
    """Compare a task's default `count_items` with what its loss is a mean over, if its step returns outputs and labels.

    Eight batches are looked at, which waits for the device. A task's own `count_items` is a declaration.
    """

    def __init__(self, task: TaskModule) -> None:
        self._task, self._num_left = task, 8 if type(task).count_items is TaskModule.count_items else 0
        self._ratios: set[float] = set()

    def see(self, output: StepOutput, batch: Any) -> None:
        """Check one batch: warn of a sum, raise a TaskError for a mean over other items than `count_items` counts."""
        if not self._num_left or output.loss is None or not isinstance(output.labels, torch.Tensor):
            return
        self._num_left -= 1
        logits = output.outputs.get("logits") if isinstance(output.outputs, Mapping) else output.outputs
        if not isinstance(logits, torch.Tensor) or output.loss.dtype.itemsize < 4:
            return
        is_close = partial(math.isclose, float(output.loss.detach()), rel_tol=TOLERANCES[output.loss.dtype])
        means = list(means_of(logits.detach(), output.labels))
        numbers = {kind: num for kind, mean, num in means if kind in MEANS and is_close(mean)}
        if not numbers and any(kind == SUM and num > 1 and is_close(total) for kind, total, num in means):
            warn_once(
                f"The loss of {type(self._task).__name__} is a sum over a batch: it and eval_loss depend on its size. "
                "Return the mean; or, to average sums over batches, let count_items(batch) return 1."
            )
        if len(numbers) != 1 or output.labels.is_floating_point():
            return
        (kind, number), count = *numbers.items(), int(self._task.count_items(batch))
        # Counts that are in proportion in all batches give the same weights.
        self._ratios.add(number / max(count, 1))
        if count != number and (len(row_sizes(output.labels)) > 1 or len(self._ratios) > 1):
            raise TaskError(
                f"Cannot weight the batches of {type(self._task).__name__} by their {count} items.",
                f"Its loss is the mean over {number} {kind.replace('_', ' ')} of this batch, and the default "
                "count_items counts the labels other than -100 of a batch, or its samples.",
                "Override count_items(batch) in the task to return the number of items that the loss averages over.",
            )
