"""Strategy x precision x optimizer x clipping on the CPU: each trains, or is refused before the first step."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import ConfigError, MissingDependencyError, OptimizerNames, Trainer, TrainerCallback
from hftrain.step.legality import legality_table

# One of each engine; the others differ from these in what they exchange, and tests/distributed holds that.
STRATEGIES = ("single", "ddp", "fsdp")
PAIRS = [row for row in legality_table() if row.device == "cpu" and row.strategy in STRATEGIES and row.reason is None]
# Those that need no package of their own; the others run below, where their packages are installed.
BUILT_IN = ("adamw_torch", "adamw_torch_fused", "adamw_anyprecision", "sgd", "adagrad", "rmsprop", "muon")
CLIPPING = (0.0, 1.0)


class Watch(TrainerCallback):
    has_begun = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.has_begun = True


def refusal(folder: Path, row: Any, optimizer: str, max_grad_norm: float) -> str | None:
    """Train two steps; return why that was refused, None if it was not."""
    watch = Watch()
    options = {"optim": optimizer, "max_grad_norm": max_grad_norm, "max_steps": 2}
    if optimizer.startswith(("galore", "apollo")):
        options["optim_target_modules"] = "all-linear"
    trainer = None
    try:
        torch.manual_seed(0)
        trainer = Trainer(
            Net(), make_arguments(folder, **options), train_dataset=make_rows(8), callbacks=[watch],
            strategy=row.strategy, precision=row.precision,
        )  # fmt: skip
        trainer.train()
    except (ConfigError, MissingDependencyError) as error:
        assert not watch.has_begun, (optimizer, max_grad_norm)
        return str(error)
    finally:
        if trainer is not None:
            trainer.strategy.close()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses), (optimizer, max_grad_norm, losses)
    return None


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: f"{row.strategy}-{row.precision}")
def test_optimizer_and_clipping_train_or_are_refused_before_the_first_step(tmp_path: Path, row: Any) -> None:
    for optimizer, max_grad_norm in itertools.product(BUILT_IN, CLIPPING):
        reason = refusal(tmp_path, row, optimizer, max_grad_norm)
        # Their eps would be 0 in half precision.
        expected = "precision='fp16'" if row.precision == "fp16_true" and optimizer != "sgd" else None
        assert (reason is None) if expected is None else (reason and expected in reason), (optimizer, reason)


@pytest.mark.optimizers
@pytest.mark.filterwarnings(r"ignore:.*invalid escape sequence")  # in torchao's own files
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_true"])
@pytest.mark.parametrize("optimizer", sorted({str(name.value) for name in OptimizerNames} - set(BUILT_IN)))
def test_optimizer_of_a_package_trains_or_is_refused_before_the_first_step(
    tmp_path: Path, optimizer: str, precision: str
) -> None:
    row = next(row for row in PAIRS if (row.strategy, row.precision) == ("single", precision))
    # torchao compiles its update for each shape, which takes a minute; test_torchao has it compile one.
    with torch.compiler.set_stance("force_eager"):
        reasons = [refusal(tmp_path, row, optimizer, max_grad_norm) for max_grad_norm in CLIPPING]
    # Without clipping nothing is refused for it.
    assert reasons[1] is not None or reasons[0] is None
