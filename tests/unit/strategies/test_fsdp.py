"""FSDP in one process: what becomes a unit, what is refused before launch, and what the documented plugin says."""

from __future__ import annotations

import json
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

from hftrain.core.errors import ConfigError, StrategyError
from hftrain.precision.registry import precisions
from hftrain.strategies import lockstep
from hftrain.strategies.fsdp.strategy import FSDPStrategy
from hftrain.strategies.fsdp.units import check_dtypes, find_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)


class Model(nn.Module):
    _no_split_modules = ("Block", "Absent")

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 8, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight
            self.blocks[0].mix.weight = self.embed.weight


def names(model: nn.Module, **options: Any) -> list[str]:
    settings = {"layer_classes": None, "min_num_params": 0, **options}
    known = {module: name for name, module in model.named_modules()}
    return [known[unit] for unit in find_units(model, **settings)]


def test_units_are_by_default_those_of_the_models_own_hint() -> None:
    assert names(Model()) == ["blocks.1", "blocks.0"]
    assert names(nn.Linear(2, 2)) == []


def test_units_are_named_by_class_inner_ones_first() -> None:
    assert names(Model(), layer_classes=["Block", "Linear"])[-2:] == ["blocks.0.mix", "blocks.0"]
    with pytest.raises(ConfigError, match=r"transformer_layer_cls_to_wrap='block'.*Did you mean 'Block'"):
        names(Model(), layer_classes=["block"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sharding": "ful_shard"}, "Did you mean 'full_shard'"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "no such state_dict_type"),
        ({"sharding": "no_shard", "offload": True}, "Only what is split"),
        ({"min_num_params": 5, "layer_classes": ["Block"]}, "two ways to choose"),
        ({"cpu_ram_efficient_loading": True, "sync_module_states": False}, "sends out"),
        ({"shard_size": 2}, "belongs to a hybrid"),
        ({"reshard_after_forward": 3}, "cannot be split into groups of 3"),
        ({"reshard_after_forward": -1}, "cannot be split into groups of -1"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        FSDPStrategy(use_cpu=True, **options)


@pytest.mark.parametrize("size", ["1", "3"])
def test_hybrid_that_would_split_nothing_or_unevenly_is_refused(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
    with pytest.raises(ConfigError, match="cannot keep copies"):
        FSDPStrategy(use_cpu=True, sharding="hybrid_shard")


def scalar() -> nn.Module:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(()))
    return model


@pytest.mark.parametrize(
    ("model", "options", "rank", "reason"),
    [
        (nn.Linear(2, 2).requires_grad_(False), {}, "0", "none of its parameters requires a gradient"),
        (scalar(), {}, "0", "no rows to split .scale."),
        (nn.Linear(2, 2, device="meta"), {"cpu_ram_efficient_loading": True}, "0", "Build it with weights"),
        (nn.Linear(2, 2, device="meta"), {}, "1", "cpu_ram_efficient_loading"),
        (nn.Linear(2, 2), {"activation_checkpointing": True}, "0", "the whole model is one unit"),
        (Model(), {"layer_classes": ["Blok"]}, "0", "Did you mean 'Block'"),
    ],
)
def test_model_that_cannot_be_split_is_refused_before_launch(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, options: dict[str, Any], rank: str, reason: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=reason):
        FSDPStrategy(use_cpu=True, **options).check_model(model)


def test_unit_of_two_dtypes_is_refused_unless_one_trains() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))
    check_dtypes(model, [*model], strategy="fsdp")
    strategy, policy = FSDPStrategy(use_cpu=True), precisions.create("fp32").policy
    strategy.launch()
    try:
        with pytest.raises(ConfigError, match="Sequential trains parameters of bfloat16 and float32"):
            strategy.setup(model, lambda each: torch.optim.SGD(each.parameters()), policy)
    finally:
        strategy.close()
    model[0].requires_grad_(False)
    check_dtypes(model, [], strategy="fsdp")


def test_plugin_is_the_documented_one_and_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = FSDPStrategy(use_cpu=True)
    plugin = strategy.accelerator_options()["fsdp_plugin"]
    assert type(plugin).__name__ == "FullyShardedDataParallelPlugin"
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert strategy.accelerator_options()["fsdp_plugin"] is plugin
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"


def test_model_of_one_unit_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    strategy = FSDPStrategy(use_cpu=True)
    strategy.launch()
    try:
        from hftrain.precision.registry import precisions

        strategy.setup(nn.Linear(2, 2), lambda m: torch.optim.SGD(m.parameters()), precisions.create("fp32").policy)
    finally:
        strategy.close()
    assert "Linear is one unit" in caplog.text


class Rank:
    """One of two processes; what is sent waits in a list."""

    device = torch.device("cpu")

    def __init__(self, rank: int, sent: list[Any]) -> None:
        self.rank, self.sent = rank, sent

    def broadcast_object(self, value: Any, src: int) -> Any:
        if self.rank == src:
            self.sent.append(json.dumps(value))
        return json.loads(self.sent[0])


def test_arguments_of_a_forward_pass_travel_as_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    call = ((torch.ones(2), [1, None]), {"mask": UserDict(a=torch.tensor([[True]])), "pair": (True, "x")})
    sent: list[Any] = []
    monkeypatch.setattr(lockstep.dist, "broadcast", lambda data, src: sent.append(data.clone()))
    assert lockstep.broadcast_tree(Rank(0, sent), call, src=0) is call  # type: ignore[arg-type]
    tensors = iter(sent[1:])
    monkeypatch.setattr(lockstep.dist, "broadcast", lambda data, src: data.copy_(next(tensors)))
    (tensor, others), options = lockstep.broadcast_tree(Rank(1, sent), None, src=0)  # type: ignore[arg-type]
    assert (tensor.tolist(), tensor.dtype, others) == ([1.0, 1.0], torch.float32, [1, None])
    assert (options["mask"]["a"].tolist(), options["mask"]["a"].dtype) == ([[True]], torch.bool)
    assert options["pair"] == (True, "x")
    with pytest.raises(StrategyError, match="hold a object"):
        lockstep.broadcast_tree(Rank(0, []), ((object(),), {}), src=0)  # type: ignore[arg-type]
