"""Recognise what a loss is by its value: a mean over labels or samples, a sum, or a sum divided by a count.

No user code is called for it. The outputs and labels of a normal step give the value that each kind of loss would
have; a loss that equals one of them to rounding is of that kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from hftrain.core.errors import TaskError
from hftrain.core.types import StepOutput
from hftrain.strategies.base import Strategy
from hftrain.task.introspect import forward_parameters
from hftrain.task.items import IGNORED_LABEL, LABELS, SAMPLES, SHIFTED, SUM
from hftrain.task.model_call import ModelCall
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule

# A sum divided by the item count that the step was given; a mean with a weight for each class, which labels of a single
# class do not show; a model's own loss of an unknown kind, which was given the count (transformers trusts that it
# divides by it) or was not.
COUNTED, WEIGHTED, TRUSTED, PLAIN = "counted", "weighted", "trusted", "plain"
WHATS = (LABELS, SHIFTED, SAMPLES, SUM, COUNTED, WEIGHTED, TRUSTED, PLAIN)

# How far equal losses may be apart, by the loss's dtype: sums are taken in another order, and 16 bits round.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 3e-4, torch.bfloat16: 2e-3}
_MOST_ELEMENTS = 1 << 24  # of the logits that are cast at once


class LossKind(NamedTuple):
    """What a loss is: one of `WHATS`, and whether it was multiplied by the number of ranks, to undo the mean there."""

    what: str
    is_scaled: bool = False


class Call(NamedTuple):
    """A call of the model: its loss, before user code could change it in place, its logits, and the labels it got.

    `what` says what the loss is if hftrain has made it.
    """

    loss: float | None
    logits: torch.Tensor | None = None
    labels: Any = None
    takes_count: bool = False
    what: str | None = None


class CallWatch:
    """Observe the calls of a plain model while one loss is computed."""

    def __init__(self, task: ModelTask, strategy: Strategy) -> None:
        self._task, self._strategy, self.model = task, strategy, strategy.unwrap(task.model)
        self._called, self._calls, self._labels = self.model, list[Call](), None
        # Copies on several devices run in the model's place, and cannot be observed.
        self._has_copies, self.is_open = getattr(strategy, "num_devices", 1) > 1, False

    def open(self, batch: Any) -> None:
        """Start to observe. Labels are taken now, because a loss may take them away from the batch."""
        self._labels, self._calls, self.is_open = self._task.label_tensor(batch), [], True
        if not self._has_copies:
            self._called = self._strategy.called(self.model)
            ModelCall.of(self._called).set(observe=self._see)

    def close(self) -> list[Call]:
        """Stop observing, and return the calls; safe to call twice."""
        ModelCall.of(self._called).set(observe=None)
        calls, self._calls, self._labels, self.is_open = self._calls, [], None, False
        return calls

    def add(self, loss: torch.Tensor, outputs: Any, *, takes_count: bool) -> None:
        """Note what the documented compute_loss has computed: a loss that is hftrain's own, or a call of copies."""
        if self._task.label_smoothing and self._task.compute_loss_func is None:
            self._calls.append(Call(float(loss.detach()), what=self._task.smoothed_items))
        elif self._has_copies:
            self._add_call(outputs, self._labels, takes_count=takes_count)

    def _add_call(self, outputs: Any, labels: Any, *, takes_count: bool) -> None:
        if not isinstance(outputs, Mapping):
            values = outputs if isinstance(outputs, (list, tuple)) else [outputs]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            outputs = {"logits" if tensor.dim() else "loss": tensor for tensor in reversed(tensors)}
        loss, logits = outputs.get("loss"), outputs.get("logits")
        number = float(loss.detach()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
        self._calls.append(Call(number, logits.detach() if torch.is_tensor(logits) else None, labels, takes_count))

    def _see(self, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        if self._strategy.has_outputs(self.model):
            named = {**dict(zip(forward_parameters(self.model), args, strict=False)), **kwargs}
            labels = self._task.label_tensor(named)
            takes_count = named.get("num_items_in_batch") is not None
            self._add_call(outputs, self._labels if labels is None else labels, takes_count=takes_count)


def recognise(
    loss: torch.Tensor, calls: Sequence[Call], counts: Mapping[str, Any], total: Any, num_ranks: int
) -> set[LossKind] | None:
    """Return everything that a loss can be by its value; None if the value cannot tell anything.

    Args:
        counts: The batch's numbers of items; a mean over other numbers of them cannot be weighted.
        total: The item count that the loss may have been divided by, or None.
        num_ranks: What the loss may have been multiplied by.
    """
    value, tolerance = float(loss.detach()), TOLERANCES.get(loss.dtype, 2e-3)
    # A small loss is the difference of larger numbers, whose rounding it has.
    logits = [call.logits for call in calls if call.logits is not None and call.logits.numel()]
    least = tolerance / 20 * max([1.0, *(float(each.abs().max()) for each in logits)])
    if not math.isfinite(value) or abs(value) < 50 * least:
        return None
    is_close = partial(math.isclose, rel_tol=tolerance, abs_tol=least)
    found = set()
    for call in calls:
        means = list(means_of(call.logits, call.labels))
        values = [(mean, kind) for kind, mean, num in means if kind == SUM or num == counts.get(kind)]
        counted = [mean * num / float(total) for kind, mean, num in means if total and kind in (LABELS, SHIFTED)]
        if call.loss is not None:
            is_mean = call.what or any(is_close(call.loss, mean) for _, mean, _ in means)
            is_counted = call.takes_count and not is_mean
            if not (is_counted and any(is_close(call.loss, each) for each in counted)):
                values.append((call.loss, call.what or (TRUSTED if is_counted else PLAIN)))
        values += [(each, COUNTED) for each in counted]
        if means and _has_one_class(call.labels):
            values += [(mean, WEIGHTED) for kind, mean, _ in means if kind in (LABELS, SHIFTED)]
        found |= {LossKind(what) for each, what in values if is_close(value, each)}
        found |= {LossKind(what, True) for each, what in values if num_ranks > 1 and is_close(value, each * num_ranks)}
    return found


def means_of(logits: torch.Tensor | None, labels: Any) -> Iterator[tuple[str, float, int]]:
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
            sums, counts = _sums(scores, classes)
            if not (num := int(counts.sum())):
                continue
            yield kind, float(sums.sum()) / num, num
            yield SUM, float(sums.sum()), num
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


def _sums(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each sample's sum of cross-entropies and its number of labels; no labels if some are no classes."""
    num_classes, marks = logits.shape[-1], labels != IGNORED_LABEL
    counts = marks.reshape(len(labels), -1).sum(1).to("cpu", torch.float64)
    if bool((marks & ((labels < 0) | (labels >= num_classes))).any()):
        return counts * 0, counts * 0
    rows, dtype = max(1, _MOST_ELEMENTS // num_classes), torch.promote_types(logits.dtype, torch.float32)
    flat = zip(torch.split(logits.reshape(-1, num_classes), rows), torch.split(labels.reshape(-1), rows), strict=True)
    each = torch.cat([cross_entropy(part.to(dtype), goal.long(), reduction="none") for part, goal in flat])
    return each.to("cpu", torch.float64).reshape(len(labels), -1).sum(1), counts


def _has_one_class(labels: torch.Tensor) -> bool:
    return not labels.is_floating_point() and len(labels[labels != IGNORED_LABEL].unique()) == 1


def is_ragged(labels: Any) -> bool:
    """Return whether the samples of a batch hold unequal numbers of labels; reads from the device."""
    is_table = isinstance(labels, torch.Tensor) and labels.dim() > 0
    return is_table and len((labels != IGNORED_LABEL).reshape(len(labels), -1).sum(1).unique()) > 1


class CountItemsCheck:
    """Compare a task's default `count_items` with what its loss is a mean over, in the first batch that can tell.

    Such a batch is ragged, and its step returns outputs and labels. Eight batches are looked at, which waits for the
    device. A task's own `count_items` is a declaration.
    """

    def __init__(self, task: TaskModule) -> None:
        self._task, self._num_left = task, 8 if type(task).count_items is TaskModule.count_items else 0

    def see(self, output: StepOutput, batch: Any) -> None:
        """Check one batch; raise a TaskError if the loss is the mean over other items than `count_items` counts."""
        if not self._num_left or output.loss is None or not isinstance(output.labels, torch.Tensor):
            return
        self._num_left -= 1
        logits = output.outputs.get("logits") if isinstance(output.outputs, Mapping) else output.outputs
        if not isinstance(logits, torch.Tensor) or output.loss.dtype.itemsize < 4 or not is_ragged(output.labels):
            return
        is_close = partial(math.isclose, float(output.loss.detach()), rel_tol=TOLERANCES[output.loss.dtype])
        means = means_of(logits.detach(), output.labels)
        numbers = {kind: num for kind, mean, num in means if kind != SUM and is_close(mean)}
        if len(numbers) != 1:
            return
        self._num_left = 0
        (kind, number), count = *numbers.items(), int(self._task.count_items(batch))
        if count != number:
            raise TaskError(
                f"Cannot weight the batches of {type(self._task).__name__} by their {count} items.",
                f"Its loss is the mean over {number} {kind.replace('_', ' ')} of this batch, and the default "
                "count_items counts the labels other than -100 of a batch, or its samples.",
                "Override count_items(batch) in the task to return the number of items that the loss averages over.",
            )
