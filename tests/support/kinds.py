"""Small models by what their loss is a mean over, and samples with unequal numbers of labels."""

from __future__ import annotations

from typing import Any

import torch
from support.tiny import Rows
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from hftrain import Trainer, set_seed

NUM_CLASSES, LENGTH, NUM_ROWS = 7, 6, 8


class Words(nn.Module):
    """The mean over labels, in a model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, NUM_CLASSES).double()
        self.register_buffer("seen", torch.zeros(()))
        self.calls: list[bool] = []
        self.num_calls = 0

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        self.seen += 1
        self.num_calls += 1
        self.calls.append(self.training)
        logits = self.layer(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": self.loss(logits, labels, **kwargs), "logits": logits}


class PerSample(Words):
    """The mean over samples of each one's own mean, as CTC has it."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        each = cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
        return (each / (labels != -100).sum(1).clamp(min=1)).mean()


class Shifts(Words):
    """Predicts the next label, which its name does not tell."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Divides(Words):
    accepts_loss_kwargs = True

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        count = kwargs.get("num_items_in_batch")
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / ((labels != -100).sum() if count is None else count)


class Adds(Divides):
    """The same, and a part that is not divided, as a mixture of experts adds one."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().loss(logits, labels, **kwargs) + self.layer.weight.square().mean()


class NeedsCount(Words):
    """Gives a sum unless it is given a count."""

    accepts_loss_kwargs = True

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / kwargs["num_items_in_batch"]


class Sums(Words):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Contrasts(Words):
    """Compares the samples of a batch with each other."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        features = logits.mean(1)
        return cross_entropy(features @ features.T, torch.arange(len(features)))


class Marks(Words):
    """Several yes or no answers for each sample."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        logits = self.layer(x).mean(1)[:, : labels[0].numel()]
        return {"loss": self.loss(logits, labels.reshape(logits.shape)), "logits": logits}

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return binary_cross_entropy_with_logits(logits, labels.double())


class Ordered(Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def make_rows(num: int = NUM_ROWS) -> Rows:
    """Return sequences of 2 to 6 labels."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for index in range(num):
        labels = torch.randint(0, NUM_CLASSES, (LENGTH,), generator=generator)
        labels[2 + index * 3 % (LENGTH - 1) :] = -100
        rows.append({"x": 3 * torch.randn(LENGTH, 3, generator=generator, dtype=torch.float64), "labels": labels})
    return rows


def full_rows() -> Rows:
    """Return sequences whose labels all count."""
    return [{**row, "labels": row["labels"].clamp(min=0)} for row in make_rows()]


def batch_of(rows: Rows) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def make_model(kind: type[Words]) -> Words:
    set_seed(0)
    return kind()
