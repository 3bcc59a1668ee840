"""Chunked cross-entropy: the plain loss and gradients to rounding, without all logits, for models of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hftrain import chunked_cross_entropy


class Model(nn.Module):
    def __init__(self, num_words: int, *, chunk_size: int = 0, bias: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Embedding(num_words, 8), nn.Linear(8, num_words, bias=bias)
        self.chunk_size = chunk_size

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, words = self.body(input_ids)[:, :-1], labels[:, 1:]
        if not self.chunk_size:
            return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), words.flatten())}
        options: Any = {"bias": self.head.bias, "chunk_size": self.chunk_size}
        return {"loss": chunked_cross_entropy(hidden, self.head.weight, words, **options)}


def texts(num_words: int, length: int, num: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, num_words, (length,), generator=generator) for _ in range(num)]
    keeps = [torch.arange(length) < 2 + index % (length - 2) for index in range(num)]
    return [{"input_ids": row, "labels": row.where(keep, -100)} for row, keep in zip(rows, keeps, strict=True)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_loss_and_gradients_are_those_of_the_plain_loss(chunk_size: int, bias: bool, reduction: str) -> None:
    hidden, labels = torch.randn(3, 10, 8, dtype=torch.float64), torch.randint(50, (3, 10))
    labels[0, 4:] = -100
    parts = [hidden, torch.randn(50, 8, dtype=torch.float64), *[torch.randn(50, dtype=torch.float64)] * bias]
    results = []
    for chunks in (False, True):
        leaves = [part.clone().requires_grad_() for part in parts]
        (x, weight), more = leaves[:2], leaves[2] if bias else None
        if chunks:
            loss = chunked_cross_entropy(x, weight, labels, bias=more, reduction=reduction, chunk_size=chunk_size)
        else:
            loss = F.cross_entropy(F.linear(x, weight, more).flatten(0, 1), labels.flatten(), reduction=reduction)
        (loss / 3).backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


def test_halves_are_reduced_in_float32() -> None:
    hidden, weight, labels = torch.randn(64, 8).bfloat16(), torch.randn(50, 8).bfloat16(), torch.randint(50, (64,))
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_size=16)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(hidden, weight).float(), labels))


class Largest(TorchDispatchMode):
    """Note the largest tensor."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        parts = out if isinstance(out, (tuple, list)) else [out]
        self.num = max([self.num, *(part.numel() for part in parts if torch.is_tensor(part))])
        return out


def test_all_logits_are_never_held() -> None:
    batch = torch.utils.data.default_collate(texts(2048, 65, num=16))
    num = {}
    for chunk_size in (0, 64):
        with Largest() as largest:
            Model(2048, chunk_size=chunk_size)(**batch)["loss"].backward()
        num[chunk_size] = largest.num
    assert num == {0: 16 * 64 * 2048, 64: 64 * 2048}
