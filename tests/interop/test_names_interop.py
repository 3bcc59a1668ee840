"""The documented functions and small classes, next to transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers import trainer_pt_utils, trainer_utils  # noqa: E402

import hftrain  # noqa: E402

pytestmark = pytest.mark.interop


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2, elementwise_affine=False), nn.LayerNorm(2))
        self.head_bias = nn.Parameter(torch.ones(1))
        self.body[0].weight.requires_grad_(False)


def test_parameters_are_listed_and_counted_alike() -> None:
    model = Nested()
    for types, patterns in (([nn.LayerNorm], None), ([nn.LayerNorm], [r"bias"]), ([nn.Linear], [r"body\.1", "head"])):
        found = hftrain.get_parameter_names(model, types, patterns)
        assert found == trainer_pt_utils.get_parameter_names(model, types, patterns)
    for trainable in (True, False):
        found = hftrain.get_model_param_count(model, trainable)
        assert found == trainer_pt_utils.get_model_param_count(model, trainable)


def test_small_functions_answer_alike(tmp_path: Any) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", "other"):
        (tmp_path / name).mkdir()
    assert hftrain.get_last_checkpoint(str(tmp_path)) == trainer_utils.get_last_checkpoint(str(tmp_path))
    shown = {"eval_mem_cpu": 5 << 20, "total_flos": 3 << 30, "eval_loss": 0.123456}
    assert hftrain.metrics_format(shown) == trainer_pt_utils.metrics_format(shown)


class Normalized(nn.Module):
    """Layers with and without weight decay, by type and by name."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True), nn.RMSNorm(4))
        self.kinds = nn.ModuleList([*kinds, nn.LayerNorm(4), nn.BatchNorm1d(4, affine=False), nn.Embedding(3, 4)])
        self.bias_net, self.Bias, self.out = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.norm, self.norm1, self.q_norm, self.norm_out = (nn.RMSNorm(4) for _ in range(4))
        self.rmsnorm_x, self.LayerNormX = nn.RMSNorm(4), nn.Linear(4, 4)
        self.final_norm = nn.ModuleDict({"gate": nn.Linear(4, 4)})
        self.my_norm, self.scales = nn.Parameter(torch.ones(2)), nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.with_child = nn.LayerNorm(4)
        self.with_child.child = nn.Linear(4, 4)
        self.out.weight = self.bias_net.weight
        self.again, self.inside = self.kinds[4], nn.Sequential(self.kinds[3])


@pytest.mark.parametrize("make", [Normalized, Nested, lambda: nn.LayerNorm(2), lambda: nn.Sequential(nn.RMSNorm(2))])
def test_same_parameters_decay(make: Any) -> None:
    model = make()
    expected = transformers.Trainer.get_decay_parameter_names(None, model)
    assert hftrain.Trainer.get_decay_parameter_names(None, model) == expected
