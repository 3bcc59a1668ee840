"""torchao's AdamW in 8 and 4 bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.optim.optimizers import OptimizerConfig, build_optimizer

pytestmark = [
    pytest.mark.optimizers,
    pytest.mark.filterwarnings("ignore:.*invalid escape sequence"),  # in torchao's own files
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),  # its compiler
]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        model(torch.full((1, 64), 0.1 * (step + 1))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_torchao_compiles_its_update() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(64, 64, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    config = OptimizerConfig(name="adamw_torch_8bit", learning_rate=1e-2)
    train(models[0], build_optimizer(config, models[0]))
    with torch.compiler.set_stance("force_eager"):
        train(models[1], build_optimizer(config, models[1]))
    torch.testing.assert_close(models[0].weight, models[1].weight)


@pytest.mark.parametrize("name", ["adamw_torch_4bit", "adamw_torch_8bit"])
def test_torchao_averages_are_quantized_and_rates_are_numbers(name: str) -> None:
    model = nn.Linear(64, 64)
    config = OptimizerConfig(name=name, learning_rate=1e-2, options="block_size=128")
    optimizer = build_optimizer(config, model)
    with torch.compiler.set_stance("force_eager"):
        train(model, optimizer)
    average = optimizer.state[model.weight]["exp_avg"]
    assert type(average).__name__ == ("OptimState4bit" if "4" in name else "OptimState8bit")
    assert average.block_size == 128
    assert type(optimizer.state[model.bias]["exp_avg"]) is torch.Tensor
    assert [type(group["lr"]) for group in optimizer.param_groups] == [float, float]


def test_torchao_refuses_unknown_options() -> None:
    with pytest.raises(ConfigError, match="bf16_stochastic_round, block_size"):
        OptimizerConfig(name="adamw_torch_8bit", options="blocks=3").optimizer_class()
