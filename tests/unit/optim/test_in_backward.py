"""Optimizers that update during the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hftrain.optim.extras.in_backward import LayerWise


class LayerWiseAdamW(LayerWise, torch.optim.AdamW):
    """What a layer-wise handler makes of a class."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(model: nn.Module, step: int = 1) -> torch.Tensor:
    return model(torch.full((2, 3), 0.2 * step)).square().mean()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() == 1]}]


def test_layer_wise_equals_the_usual_optimizer() -> None:
    ours, theirs = make_model(), make_model()
    layerwise: Any = LayerWiseAdamW(groups_of(ours), lr=0.1)
    usual = torch.optim.AdamW(groups_of(theirs), lr=0.1)
    for step in range(1, 5):
        for group in (*layerwise.param_groups, *usual.param_groups):
            group["lr"] = 0.1 / step
        layerwise.update_in_backward(loss_of(ours, step), backward=torch.Tensor.backward, max_norm=1.0)
        assert all(p.grad is None for p in ours.parameters())
        layerwise.step()
        loss_of(theirs, step).backward()
        usual.step()
        usual.zero_grad()
    for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(our, their)
    assert layerwise.state_dict()["state"].keys() == usual.state_dict()["state"].keys()
    assert layerwise.last_norm() is None


def test_layer_wise_rests_outside_of_its_backward() -> None:
    model = make_model()
    optimizer = LayerWiseAdamW(groups_of(model), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model).backward()
    optimizer.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), before, strict=True))
    assert all(p.grad is not None for p in model.parameters())


def test_layer_wise_leaves_frozen_parameters() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer: Any = LayerWiseAdamW(groups_of(model), lr=0.1)
    before = model[0].weight.detach().clone()
    optimizer.update_in_backward(loss_of(model), backward=torch.Tensor.backward, max_norm=0.0)
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    optimizer.update_in_backward(loss_of(model), backward=torch.Tensor.backward, max_norm=0.0)
    assert not torch.equal(model[0].weight, before)
    assert all(p.grad is None for p in model.parameters())
