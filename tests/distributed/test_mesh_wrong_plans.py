"""Plans that take gradients for what they are not are refused in the first update, before any weight changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hftrain.core.errors import StrategyError
from hftrain.core.types import PrecisionPolicy
from hftrain.strategies.mesh import strategy as module
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.distributed

SOUND = {"up": "colwise", "down": "rowwise"}
# What the error names, by the styles that are wrong.
WRONG = {
    # Each rank uses all of the gate's outputs for its own part.
    "the output of gate": {**SOUND, "gate": "colwise_gather_output"},
    # Every rank computes the same from the whole activations.
    "the same gradients of norm": {**SOUND, "norm": "replicated_with_grad_allreduce"},
    # It splits what differs by rank already; all before it is said to get parts of its gradients.
    "different inputs of down": {
        **dict.fromkeys(("norm", "up"), "replicated_with_grad_allreduce"),
        "gate": "colwise",
        "down": "rowwise_split_input",
    },
    # It runs on a rank's own part.
    "different gradients of scale.weight": {"up": "colwise", "down": "rowwise"},
}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Gated(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(8)
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 4), nn.Linear(16, 8)
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        inner = self.up(x)
        if "gate" in self.kind or "inputs" in self.kind:
            inner = inner * self.gate(x).mean(-1, keepdim=True)
        if "scale" in self.kind:
            inner = self.scale(inner)
        result: torch.Tensor = self.down(inner)
        return result


class Heads(nn.Module):
    """Attention that takes the length from the number of all heads, or the number of heads from the width."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.num_calls, self.shape, self.attend = 0, shape, nn.ModuleDict({name: nn.Linear(8, 8) for name in "qkv"})
        self.out, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor, tally: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.calls += 1
        tally += 1
        q, k, v = (part(x).view(len(x), *self.shape).transpose(1, 2) for part in self.attend.values())
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        found: torch.Tensor = self.drop(self.out(mixed.reshape(*x.shape[:2], -1)))
        return found * self.scale  # which the backward pass needs as it was


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, **counts: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, **counts)
        return x


def attend() -> dict[str, Any]:
    """Train a layer of attention for one step, with and without heads that it counts."""
    torch.distributed.init_process_group("gloo")
    dtypes = dict.fromkeys(("param_dtype", "compute_dtype", "reduce_dtype"), torch.float32)
    told = {}
    for kind, shape in {"counts": (-1, 4, 2), "follows": (6, -1, 2)}.items():
        torch.manual_seed(0)
        plan = {"layers.*.attend.*": "colwise", "layers.*.out": "rowwise"}
        strategy = create_strategy("tp", use_cpu=True, plan=plan)
        strategy.launch()
        layers, tally = Stack(Heads(shape), Heads(shape)), torch.zeros(1)
        model, optimizer = strategy.setup(
            layers, lambda m: torch.optim.SGD(m.parameters()), PrecisionPolicy(name="exact", **dtypes)
        )
        assert optimizer is not None
        try:
            model(torch.randn(3, 6, 8), tally=tally, num_items_in_batch=torch.tensor(3)).sum().backward()
            optimizer.step()
            calls = [[layer.num_calls, layer.calls.item()] for layer in layers.layers]
            told[kind] = [tally.item(), *calls]
        except StrategyError as error:
            told[kind] = str(error)
        strategy.close()
    return told


def test_code_that_counts_all_heads_is_refused_in_the_first_forward_pass(run_distributed: Any) -> None:
    for told in run_distributed(attend, num_processes=2):
        assert "do not compute what one process does in layers.0 (Heads)" in told["counts"]
        # The comparison leaves what a block counts as it was.
        assert told["follows"] == [2, [1, 1], [1, 1]]


def run() -> dict[str, str]:
    torch.distributed.init_process_group("gloo")
    dtypes = dict.fromkeys(("param_dtype", "compute_dtype", "reduce_dtype"), torch.float32)
    policy, told = PrecisionPolicy(name="exact", **dtypes), {}
    module.prove_blocks = lambda *_: None  # type: ignore[assignment]  # it refuses some of them before
    for kind, plan in {"sound": SOUND, **WRONG}.items():
        torch.manual_seed(0)
        strategy = create_strategy("tp", use_cpu=True, plan=plan)
        strategy.launch()
        model, optimizer = strategy.setup(Gated(kind), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), policy)
        assert optimizer is not None
        before = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
        try:
            for _ in range(2):
                model(torch.randn(4, 8)).square().sum().backward()
                optimizer.step()
            told[kind] = "trained"
        except StrategyError as error:
            told[kind] = str(error)
            after = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
            assert all(map(torch.equal, before, after))
    return told


def test_wrong_plans_are_refused_in_the_first_update(run_distributed: Any) -> None:
    for told in run_distributed(run, num_processes=2):
        assert told.pop("sound") == "trained"
        assert all(kind in said for kind, said in told.items()), told
