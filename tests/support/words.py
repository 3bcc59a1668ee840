"""Token sequences of different lengths, and classifiers of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PAD = 0


class Words(nn.Module):
    """A classifier of token sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, labels: Any = None) -> tuple[Any, ...]:
        logits = self.head(self.table(input_ids).mean(1))
        return (nn.functional.cross_entropy(logits, labels), logits)


class Measured(Words):
    """Knows what it costs."""

    def floating_point_ops(self, inputs: dict[str, torch.Tensor]) -> int:
        return 10 * inputs["input_ids"].numel()


def make_words(num: int = 10, width: int = 5) -> list[dict[str, torch.Tensor]]:
    """Return samples of which the i-th has i modulo `width` tokens of padding."""
    rows = []
    for index in range(num):
        ids = torch.randint(1, 9, (width,), generator=torch.Generator().manual_seed(index))
        ids[width - index % width :] = PAD
        rows.append({"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": torch.tensor(index % 3)})
    return rows
