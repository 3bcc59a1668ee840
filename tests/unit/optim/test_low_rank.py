"""Which modules a low-rank optimizer treats, and how its groups and state are made."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from support.optimizer_runs import Words
from torch import nn
from torch.optim import SGD

from hftrain.core.errors import ConfigError
from hftrain.optim.low_rank import LowRank, find_targets, low_rank_class
from hftrain.optim.optimizers import OptimizerConfig, optimizer_from_class


def names(model: nn.Module, wanted: Any) -> list[str]:
    found = find_targets(model, OptimizerConfig(name="galore_adamw", target_modules=wanted))
    return [name for name, parameter in model.named_parameters() if any(parameter is weight for weight in found)]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (["attn"], ["block.attn.weight"]),
        (["attn", "mlp"], ["block.attn.weight", "block.mlp.0.weight", "block.mlp.2.weight"]),
        (["block.mlp.2"], ["block.mlp.2.weight"]),
        ([r".*\.mlp\.\d"], ["block.mlp.0.weight", "block.mlp.2.weight"]),
        (r".*\.(attn|mlp\.0)", ["block.attn.weight", "block.mlp.0.weight"]),
        ("all-linear", ["block.attn.weight", "block.mlp.0.weight", "block.mlp.2.weight", "head.weight"]),
        ("all_linear", ["block.attn.weight", "block.mlp.0.weight", "block.mlp.2.weight", "head.weight"]),
        (("head",), ["head.weight"]),
    ],
)
def test_find_targets_by_names_paths_and_expressions(wanted: str | Sequence[str], expected: list[str]) -> None:
    assert names(Words(), wanted) == expected


def test_find_targets_leaves_out_what_is_not_linear(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hftrain"):
        assert names(Words(), ["mlp", "embed"]) == ["block.mlp.0.weight", "block.mlp.2.weight"]
    assert "linear modules only; optim_target_modules also names: embed, block.mlp.1" in caplog.text


def test_find_targets_leaves_out_frozen_weights() -> None:
    model = Words()
    model.head.requires_grad_(False)
    assert "head.weight" not in names(model, "all-linear")


@pytest.mark.parametrize(("wanted", "reason"), [
    (None, "Set optim_target_modules"),
    ([], "Set optim_target_modules"),
    ([3], "Set optim_target_modules"),
    (["nothing"], "matches no linear module"),
    (["embed"], "matches no linear module"),
    ("(", "not a valid regular expression"),
])  # fmt: skip
def test_find_targets_refuses(wanted: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"optim='galore_adamw'.*{reason}"):
        names(Words(), wanted)


def test_find_targets_needs_a_model() -> None:
    with pytest.raises(ConfigError, match="pass the model"):
        find_targets(None, OptimizerConfig(name="galore_adamw", target_modules="all-linear"))


def test_low_rank_splits_the_decay_groups() -> None:
    model = Words()
    config = OptimizerConfig(name="galore_adamw", weight_decay=0.1, target_modules=["attn"], options="rank=3")
    low_rank = {"rank": 8, "update_proj_gap": 2}
    made, settings = low_rank_class(SGD, config, model, low_rank=low_rank, choices={}, is_layerwise=False)
    optimizer = optimizer_from_class(made, settings, model, weight_decay=0.1)
    shown = [(group["weight_decay"], group.get("rank"), len(group["params"])) for group in optimizer.param_groups]
    assert shown == [(0.1, None, 4), (0.1, 3, 1), (0.0, None, 8)]
    assert isinstance(optimizer, LowRank)
    assert type(optimizer).__name__ == "SGD"


@pytest.mark.parametrize(("options", "reason"), [
    ("rank=0", "rank must be positive"),
    ("proj_type=up", "proj_type must be one of std, left"),
    ("rank=many", "rank must be int"),
    ("ranks=3", "rank"),
])  # fmt: skip
def test_low_rank_refuses_options(options: str, reason: str) -> None:
    config = OptimizerConfig(name="galore_adamw", target_modules="all-linear", options=options)
    low_rank = {"rank": 8, "update_proj_gap": 1, "proj_type": "std"}
    with pytest.raises(ConfigError, match=reason):
        low_rank_class(
            SGD, config, Words(), low_rank=low_rank, choices={"proj_type": ("std", "left")}, is_layerwise=False
        )
