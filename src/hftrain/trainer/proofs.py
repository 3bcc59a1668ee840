"""What a loss is, proved from the numbers of a real micro-batch: no user code is called, and nothing is guessed.

The model's outputs and labels give the losses that each kind of mean would have. A loss that equals one of them to
rounding, alone or by a known factor, is that mean. A loss that equals none of them remains unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from hftrain.core.errors import TaskError
from hftrain.core.types import StepOutput
from hftrain.strategies.base import Strategy
from hftrain.task.introspect import forward_parameters
from hftrain.task.items import IGNORED_LABEL, LABELS, SAMPLES, SHIFTED, SUM
from hftrain.task.model_call import ModelCall
from hftrain.task.module import TaskModule
from hftrain.task.tracked_count import ReadFlag, TrackedCount

# Besides the kinds of items: divided by the item count of the step; a plain mean over unknown items; one that the
# user's code has divided by the number of micro-batches.
COUNTED, PLAIN, DIVIDED = "counted", "plain", "divided"
WHATS = (LABELS, SHIFTED, SAMPLES, SUM, COUNTED, PLAIN, DIVIDED)

# How far equal losses may be apart, by the loss's dtype: sums are taken in another order, and 16 bits round.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 3e-4, torch.bfloat16: 2e-3}
_MOST_ELEMENTS = 1 << 24  # of the logits that are cast at once
_MOST_LOOKS = 8


class Finding(NamedTuple):
    """What a loss is.

    Args:
        what: One of `WHATS`.
        is_scaled: Whether it was multiplied by the number of ranks, which undoes the mean over them.
    """

    what: str
    is_scaled: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the model while a loss was computed.

    Args:
        loss: The model's own loss when it returned, before user code could change it in place.
        takes_count: Whether the item count was passed to it.
        is_read: Whether the model read the count; None if that is unknown.
    """

    loss: float | None
    logits: torch.Tensor | None
    labels: Any
    takes_count: bool
    is_read: bool | None


class Watch:
    """Observe the model's calls, and whether the model reads the item count, while a loss is computed.

    Args:
        model: Not wrapped.
        labels_of: Returns the labels among the model's arguments, or None.
        is_copied: Whether copies of the model on other devices run, whose calls and reads cannot be observed.
        strategy: It knows whose calls return the model's outputs, and whether they do so in this process.
    """

    def __init__(
        self,
        model: nn.Module,
        labels_of: Callable[[Mapping[str, Any]], torch.Tensor | None],
        *,
        is_copied: bool,
        strategy: Strategy,
    ) -> None:
        self._model, self._labels_of, self._is_copied = model, labels_of, is_copied
        self._strategy, self._called = strategy, model
        self._labels: torch.Tensor | None = None
        self._note: ReadFlag | None = None
        self.calls: list[Call] = []
        self.is_open = False
        # What the documented compute_loss has returned.
        self.own_loss: torch.Tensor | None = None

    def open(self, batch: Any) -> None:
        """Start to observe. Labels are taken now, because a loss may take them away from the batch."""
        self._labels = self._labels_of(batch) if isinstance(batch, Mapping) else None
        self.calls, self.is_open, self.own_loss = [], True, None
        if not self._is_copied:
            self._note, self._called = None, self._strategy.called(self._model)
            prepare = self._hand_on if self._called is self._model else None
            ModelCall.of(self._called).set(prepare=prepare, observe=self._see)

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process, the last stage of a pipeline, sees what the model returns."""
        return self._strategy.has_outputs(self._model) is None

    def close(self) -> list[Call]:
        """Stop observing, and return what was seen; safe to call twice."""
        self.is_open = False
        ModelCall.of(self._called).set(prepare=None, observe=None)
        calls, self.calls, self._labels, self.own_loss = self.calls, [], None, None
        return calls

    def note(self, inputs: Any, outputs: Any, *, takes_count: bool) -> None:
        """Take the documented compute_loss's call of copies of the model, which is not observed itself."""
        if self._is_copied and isinstance(inputs, Mapping):
            self._see((), {**inputs, "num_items_in_batch": takes_count or None}, outputs)

    def _hand_on(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Give the model a count that records whether it is read."""
        count = kwargs.get("num_items_in_batch")
        self._note = None
        if count is None or ModelCall.of(self._model).is_compiled:
            return kwargs
        self._note = ReadFlag()
        return {**kwargs, "num_items_in_batch": TrackedCount.make(count, self._note)}

    def _see(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        if not self._strategy.has_outputs(self._model):
            return
        named = {**dict(zip(forward_parameters(self._model), args, strict=False)), **kwargs}
        labels = self._labels_of(named)
        values = outputs if isinstance(outputs, Mapping) else _named(outputs)
        loss, logits = values.get("loss"), values.get("logits")
        self.calls.append(
            Call(
                loss=float(loss.detach()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None,
                logits=logits.detach() if isinstance(logits, torch.Tensor) else None,
                labels=self._labels if labels is None else labels,
                takes_count=named.get("num_items_in_batch") is not None,
                is_read=None if self._note is None else self._note.found(),
            )
        )


def _named(outputs: Any) -> dict[str, Any]:
    """Name the loss and the logits of a model that returns a tensor or a tuple."""
    values = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    loss = next((value for value in tensors if not value.dim()), None)
    return {"loss": loss, "logits": next((value for value in tensors if value.dim()), None)}


def findings(
    loss: torch.Tensor,
    calls: Sequence[Call],
    *,
    counts: Mapping[str, Any],
    total: float | None,
    scales: Mapping[bool, int],
    num_micro_batches: int = 1,
) -> set[tuple[Finding, str]] | None:
    """Return everything that the loss of a micro-batch can be by its value.

    Args:
        counts: The micro-batch's numbers of items; a mean over other numbers of them is none that can be weighted.
        total: The item count that the loss may have been divided by.
        scales: What the loss may have been multiplied by to undo the mean over ranks, by `Finding.is_scaled`.

    Returns:
        Findings, each with the kind of items, or an empty string. None if the value cannot tell anything.
    """
    value, tolerance = float(loss.detach()), TOLERANCES.get(loss.dtype, 2e-3)
    # A small loss is the difference of larger numbers, whose rounding it has.
    logits = [call.logits for call in calls if call.logits is not None and call.logits.numel()]
    least = tolerance / 20 * max([1.0, *(float(each.abs().max()) for each in logits)])
    if not math.isfinite(value) or abs(value) < 50 * least:
        return None
    is_close = partial(math.isclose, rel_tol=tolerance, abs_tol=least)
    return {
        (Finding(what, is_scaled), kind)
        for call in calls
        for expected, what, kind in _hypotheses(call, counts, total, num_micro_batches, is_close)
        for is_scaled, scale in scales.items()
        if not (is_scaled and what == DIVIDED) and is_close(value, expected * scale)
    }


def _hypotheses(
    call: Call, counts: Mapping[str, Any], total: float | None, num_micro_batches: int, is_close: Callable[..., bool]
) -> Iterator[tuple[float, str, str]]:
    """Yield losses that the micro-batch could have, each with what it then is, and the kind of its items."""
    means = list(means_of(call.logits, call.labels))
    divided = [(value * num / total, kind) for kind, value, num in means if total and kind in (LABELS, SHIFTED)]
    plain = [(value, kind) for kind, value, num in means if kind == SUM or num == _number(counts.get(kind))]
    if call.loss is not None:
        is_plain = any(is_close(call.loss, value) for _, value, _ in means)
        is_divided = any(is_close(call.loss, value) for value, _ in divided)
        if call.takes_count and (is_divided if is_plain != is_divided else call.is_read is not False):
            yield call.loss, COUNTED, ""
        else:
            plain.append((call.loss, PLAIN))
    yield from ((value, what, "") for value, what in plain)
    if num_micro_batches > 1:
        yield from ((value / num_micro_batches, DIVIDED, "") for value, what in plain if what != SUM)
    yield from ((value, COUNTED, kind) for value, kind in divided)


def _number(count: Any) -> int | None:
    return None if count is None else int(count)


def means_of(logits: torch.Tensor | None, labels: Any) -> Iterator[tuple[str, float, int]]:
    """Yield each kind of mean of a model's outputs: the kind, the loss, and the number of items.

    The losses are the cross-entropy for class labels, the squared error and the binary cross-entropy for others.
    """
    if not isinstance(labels, torch.Tensor) or logits is None or not logits.is_floating_point():
        return
    with torch.no_grad():
        if labels.is_floating_point() or labels.dtype == torch.bool:
            if logits.numel() == labels.numel():
                targets = labels.reshape(logits.shape).to(logits.dtype)
                yield LABELS, float(mse_loss(logits, targets)), labels.numel()
                yield LABELS, float(binary_cross_entropy_with_logits(logits, targets)), labels.numel()
            return
        for kind, scores, classes in _layouts(logits, labels.to(logits.device)):
            sums, counts = _sums(scores, classes)
            num = int(counts.sum())
            if not num:
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
    rows = max(1, _MOST_ELEMENTS // num_classes)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    flat = zip(torch.split(logits.reshape(-1, num_classes), rows), torch.split(labels.reshape(-1), rows), strict=True)
    each = torch.cat([cross_entropy(part.to(dtype), goal.long(), reduction="none") for part, goal in flat])
    return each.to("cpu", torch.float64).reshape(len(labels), -1).sum(1), counts


def label_numbers(labels: Any) -> set[int]:
    """Return the numbers of labels that the samples of a batch hold; reads from the device."""
    if not isinstance(labels, torch.Tensor) or not labels.dim():
        return set()
    return set((labels != IGNORED_LABEL).reshape(len(labels), -1).sum(1).tolist())


class CountItemsCheck:
    """Compare the default `count_items` of a task with what its loss proves to be a mean over.

    It needs a step that returns outputs and labels, and a batch whose samples hold unequal numbers of labels. The first
    such batch decides; reading it waits for the device.

    Args:
        task: Its own `count_items`, if it defines one, is a declaration and not checked.
    """

    def __init__(self, task: TaskModule) -> None:
        self._task = task
        self._num_left = _MOST_LOOKS if type(task).count_items is TaskModule.count_items else 0

    def see(self, output: StepOutput, batch: Any) -> None:
        """Check one batch.

        Raises:
            TaskError: The loss is the mean over other items than those that `count_items` counts.
        """
        if not self._num_left or output.loss is None or not isinstance(output.labels, torch.Tensor):
            return
        self._num_left -= 1
        logits = output.outputs.get("logits") if isinstance(output.outputs, Mapping) else output.outputs
        labels = output.labels
        is_exact = output.loss.dtype.itemsize >= 4
        if not isinstance(logits, torch.Tensor) or not is_exact or len(label_numbers(labels)) < 2:
            return
        loss, tolerance = float(output.loss.detach()), TOLERANCES[output.loss.dtype]
        numbers = {
            kind: num
            for kind, mean, num in means_of(logits.detach(), labels)
            if kind in (LABELS, SHIFTED, SAMPLES) and math.isclose(loss, mean, rel_tol=tolerance)
        }
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
