"""Low-rank optimizers of sharded weights: projections and averages are saved whole and come back on the mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from hftrain.core.errors import ConfigError
from hftrain.core.types import PrecisionPolicy
from hftrain.optim.low_rank import LowRank
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.distributed
PLAIN = PrecisionPolicy(name="32", **dict.fromkeys(("param_dtype", "compute_dtype", "reduce_dtype"), torch.float32))


class Projected(LowRank, torch.optim.Adam):
    """Stands for the class of a package."""

    def make_projector(self, group: Any, state: Any) -> Any:
        return SimpleNamespace()


def make(model: nn.Module) -> Projected:
    weights = list(model.parameters())
    return Projected([{"params": weights}], targets=weights, low_rank={"rank": 2}, lr=0.1)


def resume() -> dict[str, Any]:
    torch.manual_seed(0)
    strategy: Any = create_strategy("tp", use_cpu=True, plan={"0": "colwise_gather_output"})
    strategy.launch()
    model, optimizer = strategy.setup(nn.Sequential(nn.Linear(4, 4, bias=False)), make, PLAIN)
    weight = next(model.parameters())
    whole = torch.arange(8.0).view(2, 4)
    held = distribute_tensor(whole, weight.device_mesh, [Replicate()] * weight.device_mesh.ndim)
    optimizer.state[weight] = {"step": 1, "exp_avg": held, "projector": SimpleNamespace(ortho=[held])}
    state = optimizer.state_dict()
    saved = state["state"][0]
    kept = [not isinstance(saved["projector"]["ortho"][0], DTensor)]
    saved["exp_avg"] = whole  # as a checkpoint has it
    again = make(model)
    again.load_state_dict(state)
    found = again.state[weight]
    kept += [isinstance(x, DTensor) and torch.equal(x.full_tensor(), whole) for x in
             (found["exp_avg"], *found["projector"].ortho)]  # fmt: skip
    strategy.close()
    stages: Any = create_strategy("pp", use_cpu=True)
    stages.launch()
    with pytest.raises(ConfigError) as error:
        stages.setup(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), make, PLAIN)
    stages.close()
    return {"kept": kept, "error": str(error.value)}


def test_projections_come_back_on_the_mesh_and_pipelines_refuse_them(run_distributed: Any) -> None:
    for answer in run_distributed(resume, num_processes=2):
        assert answer["kept"] == [True] * 3
        assert "Stages cannot put the projections of their gradients together" in answer["error"]
