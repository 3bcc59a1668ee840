"""Parameters that a callback freezes, unfreezes or adds while DeepSpeed trains: refused by name, at each stage."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, make_rows, make_trainer
from torch import nn

from hftrain import TrainerCallback, set_seed
from hftrain.core.errors import StrategyError

pytestmark = pytest.mark.deepspeed

CHANGES = {
    "thaw": "Cannot freeze or unfreeze 'layers.0.weight'",
    "freeze": "Cannot freeze or unfreeze 'layers.4.weight'",
    "grow": "Cannot add 'layers.3.weight'",
}


class Changes(TrainerCallback):
    def __init__(self, change: str) -> None:
        self.change = change

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        layers = kwargs["model"].layers
        if state.global_step == 1:
            layers[0].requires_grad_(self.change == "thaw")
            layers[4].requires_grad_(self.change != "freeze")
            if self.change == "grow":
                layers[3] = nn.Linear(8, 8)


def change_each(folder: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed's use of torch
    found = {}
    for stage in range(4):
        for change in CHANGES:
            set_seed(7)
            model = Net()
            model.layers[0].requires_grad_(False)
            trainer = make_trainer(
                Path(folder), model, train_dataset=make_rows(64), callbacks=[Changes(change)], max_steps=3,
                gradient_accumulation_steps=2, deepspeed={"zero_optimization": {"stage": stage}},
            )  # fmt: skip
            try:
                trainer.train()
                found[f"{stage} {change}"] = ["no error", trainer.state.global_step]
            except StrategyError as error:
                found[f"{stage} {change}"] = [str(error), trainer.state.global_step]
    return found


def test_parameters_that_change_while_it_trains_are_refused(tmp_path: Path, run_distributed: Any) -> None:
    for found in run_distributed(change_each, folder=str(tmp_path)):
        for stage in range(4):
            for change, message in CHANGES.items():
                error, step = found[f"{stage} {change}"]
                assert message in error, (stage, change)
                assert step == 1, (stage, change)
