"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import ConfigError
from hftrain.optim.optimizers import OptimizerConfig, optimizer_from_class


@pytest.mark.parametrize(
    ("name", "options", "cls", "settings"),
    [
        ("adamw_torch", None, torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-6}),
        ("adamw_torch", "amsgrad=True", torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-6, "amsgrad": True}),
        ("adamw_torch_fused", "", torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-6, "fused": True}),
        ("sgd", None, torch.optim.SGD, {}),
        ("sgd", "momentum=1e-1, nesterov=False", torch.optim.SGD, {"momentum": 0.1, "nesterov": False}),
        ("sgd", {"momentum": 0.9, "dampening": "0.5"}, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
        ("adagrad", "lr_decay=0.1,eps=1e-5", torch.optim.Adagrad, {"lr_decay": 0.1, "eps": 1e-5}),
        ("rmsprop", "alpha=0.9,centered=true", torch.optim.RMSprop, {"alpha": 0.9, "centered": True}),
    ],
)
def test_optimizer_class_gives_class_and_arguments(
    name: str, options: Mapping[str, Any] | str | None, cls: type, settings: dict[str, Any]
) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.25, betas=(0.8, 0.9), eps=1e-6, options=options)
    assert config.optimizer_class() == (cls, {"lr": 0.25, **settings})


def test_adamw_hf_is_adamw_torch_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="adamw_torch"):
        legacy = OptimizerConfig.of(TrainingArguments("out", optim="adamw_hf"))
    assert legacy == OptimizerConfig.of(TrainingArguments("out", optim="adamw_torch"))


def test_optimizer_from_class_uses_parameters_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    settings = {"lr": 0.1, "params": [{"params": [model[1].weight]}]}
    optimizer = optimizer_from_class(torch.optim.SGD, settings, model)
    assert [group["params"] for group in optimizer.param_groups] == [[model[1].weight]]
    assert "params" in settings


def test_optimizer_from_class_heeds_the_weight_decay_of_its_arguments() -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_from_class(torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}, model)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


def test_optimizer_from_class_refuses_two_weight_decays() -> None:
    with pytest.raises(ConfigError, match="two weight decays"):
        optimizer_from_class(torch.optim.AdamW, {"weight_decay": 0.3}, nn.Linear(2, 2), weight_decay=0.1)
