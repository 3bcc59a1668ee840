"""Weights are moved by one unit in the last place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hftrain.cli.scripts import Perturb


@pytest.mark.parametrize(("unit", "dtype"), [(0.0, torch.float32), (2.0**-7, torch.float32), (0.0, torch.bfloat16)])
def test_every_trained_parameter_moves_by_one_unit_in_the_last_place(unit: float, dtype: torch.dtype) -> None:
    model = nn.Linear(40, 40).to(dtype)
    model.bias.requires_grad_(False)
    with torch.no_grad():
        model.weight[0] = 0
        model.weight[1] = 3.0
    before, frozen = model.weight.detach().clone(), model.bias.clone()
    Perturb(unit).on_train_begin(None, None, None, model=model)
    moved = (model.weight.detach() - before).float()
    eps = unit or torch.finfo(dtype).eps
    assert set((moved[1] / (2 * eps)).tolist()) == {-1.0, 1.0}
    assert not moved[0].any()
    relative = (moved[2:] / before[2:].float()).abs()
    assert eps / 2 * 0.99 <= float(relative.min())
    assert float(relative.max()) <= eps * 1.01
    assert torch.equal(model.bias, frozen)
