"""Every strategy with every precision on the CPU: it trains, or it is refused with its reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.precision.registry import precisions
from hftrain.step.assemble import assemble_stepper
from hftrain.step.legality import check_legal, legality_table
from hftrain.strategies.registry import create_strategy

# DeepSpeed's rows run where it is installed: tests/deepspeed/test_launches.py. DataParallel and MPS want GPUs; XLA's
# are never made for a CPU: tests/distributed/test_xla.py trains with them.
ELSEWHERE = ("deepspeed", "data_parallel", "mps", "xla")
ON_CPU = [row for row in legality_table() if row.device == "cpu" and not row.strategy.startswith(ELSEWHERE)]


@pytest.mark.filterwarnings("ignore:AdamW keeps the squares")
@pytest.mark.parametrize("row", ON_CPU, ids=lambda row: f"{row.strategy}-{row.precision}")
def test_pair_trains_or_is_refused_with_its_reason(row: object) -> None:
    strategy, precision = create_strategy(row.strategy, use_cpu=True), precisions.create(row.precision)
    if row.reason is not None:
        with pytest.raises(ConfigError, match=row.reason):
            check_legal(strategy, precision)
        return
    check_legal(strategy, precision)
    try:
        strategy.launch()
        precision.open(strategy.device, strategy.scaler_factory)
        train_two_steps(strategy, precision)
    finally:
        precision.close()
        strategy.close()


def train_two_steps(strategy: object, precision: object) -> None:
    model, optimizer = strategy.setup(
        precision.convert(nn.Linear(4, 1)),
        lambda model: torch.optim.AdamW(model.parameters(), eps=1e-4),
        precision.policy,
    )
    optimizer = precision.attach(model, optimizer)
    stepper = assemble_stepper(strategy=strategy, precision=precision, optimizer=optimizer, max_grad_norm=1.0)
    before = {name: value.clone() for name, value in strategy.model_state(model).items()}
    for _ in range(2):
        batch = strategy.to_device({"x": torch.randn(2, 4)})
        with stepper.autocast():
            loss = model(batch["x"]).float().square().mean() / 100  # small, for float16 not to overflow
        stepper.backward(loss)
        assert stepper.clip() > 0
        assert stepper.step()
        stepper.zero_grad()
    after = strategy.model_state(model)
    assert sorted(after) == ["bias", "weight"]
    assert not torch.equal(after["weight"], before["weight"])
