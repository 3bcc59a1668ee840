"""What a loss is, proved from the numbers of a real micro-batch: no user code is called, and nothing is guessed.

The model's outputs and labels give the losses that each kind of mean would have. A loss that equals one of them to
rounding, alone or by a known factor, is that mean. A loss that equals none of them remains unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from hftrain.task.introspect import forward_parameters
from hftrain.task.items import IGNORED_LABEL, LABELS, SAMPLES, SHIFTED, SUM
from hftrain.task.model_call import ModelCall
from hftrain.task.noted import Note, NotedCount

# Besides the kinds of items: divided by the item count of the step; a plain mean over unknown items; one that the
# user's code has divided by the number of micro-batches.
COUNTED, PLAIN, DIVIDED = "counted", "plain", "divided"
WHATS = (LABELS, SHIFTED, SAMPLES, SUM, COUNTED, PLAIN, DIVIDED)

# How far equal losses may be apart, by the loss's dtype: sums are taken in another order.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_MOST_ELEMENTS = 1 << 24  # of the logits that are cast at once


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
    """

    loss: float | None
    logits: torch.Tensor | None
    labels: Any
    takes_count: bool


class Watch:
    """Observe the model's calls and the reads of the item count while a loss is computed.

    Args:
        model: Not wrapped.
        labels_of: Returns the labels among the model's arguments, or None.
        is_copied: Whether copies of the model on other devices run, whose calls and reads cannot be observed.
    """

    def __init__(
        self, model: nn.Module, labels_of: Callable[[Mapping[str, Any]], torch.Tensor | None], *, is_copied: bool
    ) -> None:
        self._model, self._labels_of, self._is_copied = model, labels_of, is_copied
        self.is_open = False
        self._labels: torch.Tensor | None = None
        self._note: Note | None = None
        self.calls: list[Call] = []

    def open(self, batch: Any, count: Any) -> Any:
        """Start to observe; return the count to pass on. Taken now, because a loss may take the labels away."""
        call = ModelCall.of(self._model)
        self._labels = self._labels_of(batch) if isinstance(batch, Mapping) else None
        self._note = Note() if count is not None and not self._is_copied and not call.is_compiled else None
        self.calls, self.is_open = [], True
        if not self._is_copied:
            call.set(observe=self._see)
        return count if self._note is None else NotedCount.make(count, self._note)

    def close(self) -> None:
        """Stop observing; safe to call twice."""
        self.is_open = False
        ModelCall.of(self._model).set(observe=None)

    @property
    def is_read(self) -> bool | None:
        """Whether code read the count; None if that is unknown. A loss cannot be divided by a count that is unread."""
        return None if self._note is None else self._note.is_read

    def note(self, inputs: Any, outputs: Any, *, takes_count: bool) -> None:
        """Take the documented compute_loss's call of copies of the model, which is not observed itself."""
        if self._is_copied and isinstance(inputs, Mapping):
            self._see((), {**inputs, "num_items_in_batch": takes_count or None}, outputs)

    def _see(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
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
    watch: Watch,
    *,
    total: float | None,
    scales: Mapping[bool, int],
    num_micro_batches: int = 1,
) -> set[tuple[Finding, str]] | None:
    """Return everything that the loss of a micro-batch can be by its value.

    Args:
        total: The item count that the loss may have been divided by.
        scales: What the loss may have been multiplied by to undo the mean over ranks, by `Finding.is_scaled`.

    Returns:
        Findings, each with the kind of items, or an empty string. None if the value cannot tell anything.
    """
    value = float(loss.detach())
    if not math.isfinite(value) or not value:
        return None
    tolerance = TOLERANCES.get(loss.dtype, 1e-2)
    return {
        (Finding(what, is_scaled), kind)
        for expected, what, kind in _hypotheses(watch, total=total, num_micro_batches=num_micro_batches)
        for is_scaled, scale in scales.items()
        if not (is_scaled and what == DIVIDED) and math.isclose(value, expected * scale, rel_tol=tolerance)
    }


def _hypotheses(watch: Watch, *, total: float | None, num_micro_batches: int) -> Iterator[tuple[float, str, str]]:
    """Yield losses that the micro-batch could have, each with what it then is, and the kind of its items."""
    for call in watch.calls:
        is_counted = call.takes_count and watch.is_read is not False
        means = list(means_of(call.logits, call.labels))
        plain = [(value, what) for what, value, _ in means]
        if call.loss is not None:
            if is_counted:
                yield call.loss, COUNTED, ""
            else:
                plain.append((call.loss, PLAIN))
        yield from ((value, what, "") for value, what in plain)
        if num_micro_batches > 1:
            yield from ((value / num_micro_batches, DIVIDED, "") for value, what in plain if what != SUM)
        if total:
            yield from ((value * num / total, COUNTED, kind) for kind, value, num in means if num)


def means_of(logits: torch.Tensor | None, labels: Any) -> Iterator[tuple[str, float, int]]:
    """Yield each kind of mean of a model's outputs: the kind, the loss, and the number of labels of a mean over labels.

    The losses are the cross-entropy for class labels, the squared error and the binary cross-entropy for others.
    """
    if not isinstance(labels, torch.Tensor) or logits is None or not logits.is_floating_point():
        return
    with torch.no_grad():
        if labels.is_floating_point() or labels.dtype == torch.bool:
            if logits.numel() == labels.numel():
                targets = labels.reshape(logits.shape).to(logits.dtype)
                yield SAMPLES, float(mse_loss(logits, targets)), 0
                yield SAMPLES, float(binary_cross_entropy_with_logits(logits, targets)), 0
            return
        for kind, scores, classes in _layouts(logits, labels.to(logits.device)):
            sums, counts = _sums(scores, classes)
            num = int(counts.sum())
            if not num:
                continue
            yield kind, float(sums.sum()) / num, num
            yield SUM, float(sums.sum()), 0
            if labels.dim() > 1:  # otherwise a sample has one label, and its mean is that label's
                yield SAMPLES, float((sums / counts.clamp(min=1)).mean()), 0


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
    if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return set()
    return set((labels != IGNORED_LABEL).reshape(len(labels), -1).sum(1).tolist())
