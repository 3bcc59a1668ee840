"""The older engine of FSDP in one process: its options, what it refuses, and what it must not lose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.precision.registry import precisions
from hftrain.strategies.fsdp.wrapper import FSDP1Strategy
from hftrain.strategies.registry import create_strategy

POLICY = precisions.create("fp32").policy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(x))) + self.shift


@pytest.fixture
def strategy() -> Iterator[FSDP1Strategy]:
    strategy = FSDP1Strategy(use_cpu=True, layer_classes=["LayerNorm"])
    strategy.launch()
    yield strategy
    strategy.close()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"backward_prefetch": "backward_prae"}, "Did you mean 'backward_pre'"),
        ({"reshard_after_forward": False}, "does not follow from 'full_shard'"),
        ({"reshard_after_forward": 2}, "does not follow from 'full_shard'"),
        ({"sharding": "ful_shard"}, "Did you mean 'full_shard'"),
        ({"sharding": "no_shard", "offload": True}, "Only what is split"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        FSDP1Strategy(use_cpu=True, **options)


def test_name_takes_the_options_of_both_engines() -> None:
    strategy = create_strategy("fsdp1", use_cpu=True, sharding="shard_grad_op", backward_prefetch="no_prefetch")
    assert (strategy.sharding, strategy.backward_prefetch) == ("shard_grad_op", "no_prefetch")
    with pytest.raises(ConfigError, match="Received: stage=3"):
        create_strategy("fsdp1", use_cpu=True, stage=3)


@pytest.mark.parametrize("size", ["1", "3"])
def test_hybrid_that_torch_would_train_apart_is_refused(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
    with pytest.raises(ConfigError, match="cannot keep copies"):
        FSDP1Strategy(use_cpu=True, sharding="hybrid_shard")


def test_unit_of_two_dtypes_is_refused_before_launch() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))
    with pytest.raises(ConfigError, match=r"Sequential has parameters of torch\.bfloat16 and torch\.float32"):
        FSDP1Strategy(use_cpu=True).check_model(model)
    FSDP1Strategy(use_cpu=True, layer_classes=["Linear"]).check_model(model)
    with pytest.raises(ConfigError, match="none of its parameters requires a gradient"):
        FSDP1Strategy(use_cpu=True).check_model(nn.Linear(2, 2).requires_grad_(False))


def test_plugin_says_which_version(strategy: FSDP1Strategy) -> None:
    plugin = strategy.accelerator_options()["fsdp_plugin"]
    assert (plugin.fsdp_version, plugin.use_orig_params) == (1, True)


def test_wrapped_model_keeps_names_ties_and_itself(strategy: FSDP1Strategy) -> None:
    model = Net()
    names = list(model.state_dict())
    wrapped, _ = strategy.setup(model, make_optimizer, POLICY)
    assert strategy.unwrap(wrapped) is model
    state = strategy.model_state(wrapped)
    assert list(state) == names
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    own = strategy.own_state(model)
    assert list(own) == names
    assert own["head.weight"] is own["embed.weight"]
    assert strategy.for_evaluation(model) is wrapped
    assert strategy.place(model) is model
    assert strategy.setup(model, make_optimizer, POLICY)[0] is wrapped


def test_state_that_does_not_fit_is_refused_as_torch_does(strategy: FSDP1Strategy) -> None:
    model = Net()
    wrapped, _ = strategy.setup(model, make_optimizer, POLICY)
    state = {**strategy.model_state(wrapped), "shift": torch.zeros(4)}
    strategy.load_model_state(model, state)
    assert not model.shift.any()
    with pytest.raises(RuntimeError, match=r"missing: \['shift'\]"):
        strategy.load_model_state(model, {name: value for name, value in state.items() if name != "shift"})
    with pytest.raises(RuntimeError, match=r"unexpected: .*'more'"):
        strategy.load_model_state(model, {**state, "more": torch.zeros(1)})
    found = strategy.load_model_state(model, {"shift": torch.ones(4)}, strict=False)
    assert "embed.weight" in found.missing_keys
    assert model.shift.all()
    with pytest.raises(RuntimeError, match="size mismatch"):
        strategy.load_model_state(model, {**state, "shift": torch.zeros(5)})


def test_weights_without_memory_come_from_the_first_process(strategy: FSDP1Strategy) -> None:
    with torch.device("meta"):
        model = Net()
    # As in a process that is not the first: it gets memory, and then what is sent.
    strategy.rank = 1
    strategy.cpu_ram_efficient_loading = True
    wrapped, _ = strategy.setup(model, make_optimizer, POLICY)
    assert not any(parameter.is_meta for parameter in wrapped.parameters())
    own = strategy.own_state(model)
    assert own["head.weight"] is own["embed.weight"]
