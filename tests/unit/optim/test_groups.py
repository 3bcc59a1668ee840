"""Which parameters decay."""

from __future__ import annotations

import pytest
from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.optim.groups import decay_parameter_names, parameter_groups


class Block(nn.Module):
    """One child for each branch of the rule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.ln = nn.LayerNorm(2)
        self.plain_LayerNorm = nn.Linear(2, 2, bias=False)
        self.RMSNorm = nn.Linear(2, 2, bias=False)
        self.norm = nn.Linear(2, 2, bias=False)
        self.q_norm = nn.Linear(2, 2, bias=False)
        self.norm1 = nn.Linear(2, 2, bias=False)
        self.normal = nn.Linear(2, 2, bias=False)
        self.bn = nn.BatchNorm1d(2)


def test_decay_parameter_names_follow_the_documented_rule() -> None:
    assert decay_parameter_names(nn.ModuleDict({"block": Block()})) == [
        "block.linear.weight",
        "block.norm1.weight",
        "block.normal.weight",
        "block.bn.weight",
    ]


def test_decay_parameter_names_hold_every_name_of_a_tied_parameter() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    assert decay_parameter_names(model) == ["embed.weight", "head.weight"]
    decaying, others = parameter_groups(model, weight_decay=0.1)
    assert len(decaying["params"]) == 1
    assert not others["params"]


def test_parameter_groups_refuse_absent_names() -> None:
    with pytest.raises(ConfigError, match=r"no parameter 'module\.weight'"):
        parameter_groups(nn.Linear(2, 2), weight_decay=0.1, decay_names=["module.weight"])


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)], ids=["empty", "frozen"])
def test_parameter_groups_refuse_a_model_without_trainable_parameters(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        parameter_groups(model, weight_decay=0.0)
