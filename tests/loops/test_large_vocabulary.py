"""The recipe for a large vocabulary: the plain loss's gradients, also with accumulation, without all logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import make_arguments
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hftrain import Trainer, set_seed

pytestmark = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")


class Model(nn.Module):
    def __init__(self, num_words: int, *, chunks: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Embedding(num_words, 8), nn.Linear(8, num_words, bias=False)
        self.options = {"options": nn.LinearCrossEntropyOptions()} if chunks else {}

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, words = self.body(input_ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"loss": F.linear_cross_entropy(hidden, self.head.weight, words, **self.options)}


def texts(num_words: int, length: int, num: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, num_words, (length,), generator=generator) for _ in range(num)]
    keeps = [torch.arange(length) < 2 + index % (length - 2) for index in range(num)]
    return [{"input_ids": row, "labels": row.where(keep, -100)} for row, keep in zip(rows, keeps, strict=True)]


def test_weights_are_those_of_the_plain_loss(tmp_path: Path) -> None:
    found = []
    for chunks in (False, True):
        set_seed(3)
        model = Model(300, chunks=chunks).double()
        args = make_arguments(
            tmp_path / str(chunks), max_steps=3, gradient_accumulation_steps=3, learning_rate=0.1, optim="sgd"
        )
        Trainer(model, args, train_dataset=texts(300, 12), count_items="shifted_labels").train()
        found.append(model.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """Note the largest tensor."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.num = max(
            [self.num, *(t.numel() for t in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(t))]
        )
        return out


def test_all_logits_are_never_held() -> None:
    batch = torch.utils.data.default_collate(texts(2048, 65, num=16))
    num = {}
    for chunks in (False, True):
        model = Model(2048, chunks=chunks)
        with Largest() as largest:
            model(**batch)["loss"].backward()
        num[chunks] = largest.num
    assert num[False] == 16 * 64 * 2048
    assert num[True] < num[False] / 4
