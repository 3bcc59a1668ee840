"""What a loss can be a mean over, as read off the outputs of one batch: each kind, with its loss and its items."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from hftrain.trainer.loss_kinds import LABELS, SAMPLES, SHIFTED, SUM, WEIGHTED, means_of
from hftrain.trainer.loss_normalization import _weighted

SCORES = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0], [-1.0, 3.0, 0.0], [0.0, 0.0, 1.0]])
TOKENS = torch.stack([SCORES, SCORES.flip(0)])  # two samples of four tokens
ENTROPY = {"reduction": "none"}


def means(logits: torch.Tensor, labels: torch.Tensor) -> list[tuple[str, float, int]]:
    return [(kind, pytest.approx(loss), items) for kind, loss, items in means_of(logits, labels)]


@pytest.mark.parametrize(("classes", "is_ambiguous"), [([0, 1, 2, 2], False), ([2, 1, 0, 0], False), ([1] * 4, True)])
def test_mean_of_one_class_may_be_weighted(classes: list[int], is_ambiguous: bool) -> None:
    """With one class, or equal losses, a mean that weights the classes is equal to one that does not."""
    labels = torch.tensor(classes)
    each = cross_entropy(SCORES, labels, **ENTROPY)  # type: ignore[call-overload]
    weighted = [(WEIGHTED, float(each.mean()), 4)] * is_ambiguous
    assert means(SCORES, labels) == [(LABELS, float(each.mean()), 4), (SUM, float(each.sum()), 4), *weighted]
    assert WEIGHTED in [kind for kind, *_ in means_of(torch.zeros(4, 3), labels)]


def test_tokens_are_counted_where_they_have_labels_shifted_or_not() -> None:
    labels = torch.tensor([[0, -100, 2, 1], [1, 1, -100, -100]])
    found = means(TOKENS, labels)
    for kind, logits, goals in ((LABELS, TOKENS, labels), (SHIFTED, TOKENS[:, :-1], labels[:, 1:])):
        each = cross_entropy(logits.flatten(0, 1), goals.flatten(), **ENTROPY).reshape(goals.shape)  # type: ignore[call-overload]
        marks = goals != -100
        num, sums = int(marks.sum()), each.sum(1)
        assert found[:3] == [
            (kind, float(sums.sum()) / num, num), (SUM, float(sums.sum()), num),
            (SAMPLES, float((sums / marks.sum(1)).mean()), 2),
        ]  # fmt: skip
        found = found[3:]
    assert not found


def test_classes_may_stand_in_the_second_dimension() -> None:
    logits, labels = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5))
    each = cross_entropy(logits, labels, **ENTROPY)  # type: ignore[call-overload]
    assert means(logits, labels)[:2] == [(LABELS, float(each.mean()), 40), (SUM, float(each.sum()), 40)]


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [0, 1, 2, -1], [-100] * 4, "words", [[0, 1], [1, 0]]])
def test_what_is_no_class_is_a_mean_of_nothing(labels: Any) -> None:
    assert means(SCORES, labels if isinstance(labels, str) else torch.tensor(labels)) == []


def test_numbers_have_two_losses() -> None:
    labels = SCORES.sigmoid().roll(1)
    assert means(SCORES, labels) == [
        (LABELS, float(mse_loss(SCORES, labels)), 12),
        (LABELS, float(binary_cross_entropy_with_logits(SCORES, labels)), 12),
    ]
    assert means(SCORES, labels[:3]) == []


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_mean_is_weighted_by_its_items(kind: Any) -> None:
    """Counts that are on a device stay there."""
    nan = torch.tensor(float("nan"))
    weighted = [_weighted(loss, kind(items), total) for loss, items, total in ((torch.tensor(6.0), 2, 8), (nan, 0, 8))]
    assert weighted == [torch.tensor(1.5), torch.tensor(0.0)]
    assert _weighted(nan, kind(0), 0).isnan()
