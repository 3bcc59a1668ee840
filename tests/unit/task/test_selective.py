"""Selective activation checkpointing: the results of none to the bit, by operation or by layer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import make_arguments, make_rows
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from hftrain import ConfigError, Trainer, set_seed
from hftrain.extras.recompute import _choose_policy, recompute_activations


class Block(nn.Module):
    """Attention and a wide layer, with dropout after both."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.wide, self.out = nn.Linear(4, 12), nn.Linear(4, 16), nn.Linear(16, 4)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        x = x + F.dropout(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), dropout_p=0.3), 0.2)
        return x + F.dropout(self.out(F.gelu(self.wide(x))), 0.2)


class Deep(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(4))), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.blocks(x[:, None].expand(-1, 8, -1)).mean(1))
        return (logits,) if labels is None else (F.cross_entropy(logits, labels), logits)


@contextmanager
def saved_bytes() -> Iterator[dict[int, int]]:
    """Note the bytes of each storage that a forward pass saves for the backward pass."""
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def train(folder: Path, kwargs: Any = None, **options: Any) -> Trainer:
    set_seed(3)
    if kwargs is not None:
        options |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
    trainer = Trainer(Deep(), make_arguments(folder, max_steps=2, **options), train_dataset=make_rows(8))
    trainer.train()
    return trainer


CALLS = {"op": [4] * 4, 1: [4] * 4, 2: [4, 2, 4, 2], 3: [4, 2, 2, 4]}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("as_text", [False, True])
def test_results_are_those_without_to_the_bit(tmp_path: Path, kind: Any, as_text: bool) -> None:
    plain = train(tmp_path)
    kwargs = {"selective": kind, **({"layer_classes": ["Block"]} if kind == "op" else {})}
    again = train(tmp_path, json.dumps(kwargs) if as_text else kwargs)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    assert [block.num_calls for block in again.model.blocks] == CALLS[kind]
    assert [block.num_calls for block in plain.model.blocks] == [2] * 4
    assert all("forward" not in vars(block) for block in again.model.blocks)


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")  # those of this test, in torch 2.15
def test_operations_that_are_kept_are_not_repeated() -> None:
    flops, kept = {}, {}
    x, labels = torch.randn(4, 4), torch.zeros(4, dtype=torch.long)
    for kind in (None, "op", 1):
        model = Deep()
        if kind is not None:
            recompute_activations(model, {"selective": kind, "layer_classes": ["Block"]})
        with saved_bytes() as saved:
            loss = model(x, labels)[0]
        kept[kind] = sum(saved.values())
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        flops[kind] = counter.get_flop_counts()["Global"]
    products = {kind: {op: num for op, num in found.items() if "bmm" not in str(op)} for kind, found in flops.items()}
    assert products["op"] == products[None] != products[1]
    assert kept[1] < kept[None]


def test_attention_is_repeated_only_if_it_draws() -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.randn(1, 1, 2, 4)
    assert _choose_policy(None, op, q, q, q, 0.0, True, scale=0.5).name == "MUST_SAVE"
    assert _choose_policy(None, op, q, q, q, 0.1, True).name == "PREFER_RECOMPUTE"
    assert _choose_policy(None, torch.ops.aten.mm.default, q, q).name == "MUST_SAVE"
    assert _choose_policy(None, torch.ops.aten.bmm.default, q, q).name == "PREFER_RECOMPUTE"


@pytest.mark.parametrize(
    "kwargs",
    [
        *({"selective": kind} for kind in ("ops", 0, -1, True, 1.5)),
        {"selective": "op", "use_reentrant": True},
        {"selective": 2, "context_fn": print},
    ],
)
def test_what_cannot_work_is_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="n to recompute every n-th"):
        recompute_activations(Deep(), kwargs)


def test_a_number_needs_layers() -> None:
    with pytest.raises(ConfigError, match="_no_split_modules"):
        recompute_activations(nn.Sequential(nn.Linear(2, 2)), {"selective": 2})
