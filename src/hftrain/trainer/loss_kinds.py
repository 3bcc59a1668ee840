"""Recognise what a loss is by its value: a mean over labels or samples, a sum, or a sum divided by a count.

No user code is called for it. The outputs and labels of a normal step give the value that each kind of loss would
have; a loss that equals one of them to rounding is of that kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from hftrain.core.errors import TaskError
from hftrain.core.tree import tensors_of
from hftrain.core.types import StepOutput
from hftrain.strategies.base import Strategy
from hftrain.task.introspect import forward_parameters
from hftrain.task.items import IGNORED_LABEL, LABELS, SAMPLES, SHIFTED, SUM
from hftrain.task.model_call import ModelCall
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule

MEANS = (LABELS, SHIFTED, SAMPLES)
# A sum divided by the item count that the step was given; a mean with a weight for each class, which labels of a single
# class or items with equal losses do not show; a model's own loss of an unknown kind, which was given the count, as
# transformers trusts, or was not.
COUNTED, WEIGHTED, TRUSTED, PLAIN = "counted", "weighted", "trusted", "plain"

# How far equal losses may be apart, by dtype: sums are taken in another order, and 16 bits are rough.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_MOST_ELEMENTS = 1 << 24  # of the logits that are cast at once


class LossKind(NamedTuple):
    """What a loss is, and whether it was multiplied by the number of ranks, to undo the mean over them."""

    what: str
    is_scaled: bool = False


# The likeliest first.
EVERY_KIND = [
    LossKind(what, is_scaled)
    for is_scaled in (False, True)
    for what in (*MEANS, SUM, COUNTED, WEIGHTED, TRUSTED, PLAIN)
]


class Call(NamedTuple):
    """A call of the model: its loss, before user code could change it in place, its logits, and the labels it got."""

    loss: float | None
    logits: torch.Tensor | None
    labels: Any
    takes_count: bool


class LossWatch:
    """Observe the calls of a plain model while one loss is computed, and recognise the loss."""

    def __init__(self, task: ModelTask, strategy: Strategy, num_ranks: int) -> None:
        self._task, self._strategy, self._num_ranks = task, strategy, num_ranks
        self.model = self._called = strategy.unwrap(task.model)
        self._calls: list[Call] = []
        self._labels: torch.Tensor | None = None

    def open(self, batch: Any) -> None:
        """Start to observe. Labels are taken now, because a loss may take them away from the batch."""
        self._labels, self._calls = self._task.label_tensor(batch), []
        self._called = self._strategy.called(self.model)
        ModelCall.of(self._called).set(observe=self._see)

    def close(self) -> list[Call]:
        """Stop observing, and return the calls; safe to call twice."""
        ModelCall.of(self._called).set(observe=None)
        calls, self._calls, self._labels = self._calls, [], None
        return calls

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
        scales = (1, self._num_ranks)[: 1 + (self._num_ranks > 1)]
        return {LossKind(what, scale > 1) for each, what in values for scale in scales if is_close(value, each * scale)}


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
            yield call.loss, TRUSTED if is_unknown else PLAIN


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


class CountItemsCheck:
    """Compare a task's default `count_items` with what its loss is a mean over, if its step returns outputs and labels.

    Eight batches are looked at, which waits for the device. A task's own `count_items` is a declaration.
    """

    def __init__(self, task: TaskModule) -> None:
        self._task, self._num_left = task, 8 if type(task).count_items is TaskModule.count_items else 0
        self._ratios: set[float] = set()

    def see(self, output: StepOutput, batch: Any) -> None:
        """Check one batch; raise a TaskError if the loss is the mean over other items than `count_items` counts."""
        if not self._num_left or output.loss is None or not isinstance(output.labels, torch.Tensor):
            return
        self._num_left -= 1
        logits = output.outputs.get("logits") if isinstance(output.outputs, Mapping) else output.outputs
        if not isinstance(logits, torch.Tensor) or output.loss.dtype.itemsize < 4:
            return
        is_close = partial(math.isclose, float(output.loss.detach()), rel_tol=TOLERANCES[output.loss.dtype])
        means = means_of(logits.detach(), output.labels)
        numbers = {kind: num for kind, mean, num in means if kind in MEANS and is_close(mean)}
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
