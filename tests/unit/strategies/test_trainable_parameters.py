"""Parameters that an engine cannot begin to train in mid-run."""

from __future__ import annotations

import pytest
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hftrain.core.errors import StrategyError
from hftrain.strategies.trainable_parameters import FixedParameters


def test_unfrozen_and_frozen_parameters_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    fixed = FixedParameters(model, engine="DeepSpeed")
    fixed.check()
    model[0].bias.requires_grad_(True)
    with pytest.raises(StrategyError, match=r"'0\.bias' while the training runs.*DeepSpeed fixes"):
        fixed.check()
    model[0].bias.requires_grad_(False)
    model[1].weight.requires_grad_(False)
    with pytest.raises(StrategyError, match=r"'1\.weight'"):
        fixed.check()


def test_run_that_is_freed_while_a_module_gets_a_parameter_leaves_torchs_hooks_alone() -> None:
    runs: list[FixedParameters] = []
    handle = register_module_parameter_registration_hook(lambda *_: runs.clear())
    try:
        runs.append(FixedParameters(nn.Linear(2, 2), engine="DeepSpeed"))
        nn.Linear(2, 2)
    finally:
        handle.remove()
    assert not runs
    added = FixedParameters(model := nn.Linear(2, 2), engine="DeepSpeed")
    model.extra = nn.Parameter(model.weight.detach())
    with pytest.raises(StrategyError, match="'extra'"):
        added.check()
