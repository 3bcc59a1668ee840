"""Every optimizer and every schedule of torch is saved, and a run that is resumed equals one that never stopped."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import check_resumes
from support.tiny import Net, make_rows, make_trainer
from torch import nn
from torch.optim import lr_scheduler as schedules

from hftrain import ConfigError, Trainer, TrainerCallback, set_seed

Make = Callable[[Any], Any]

SCHEDULES: dict[str, Make] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedules.StepLR(o, 2),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lambda o: schedules.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: schedules.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 5),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.001, 0.1, step_size_up=2),
    "CyclicLR own scale": lambda o: schedules.CyclicLR(o, 0.001, 0.1, step_size_up=2, scale_fn=lambda x: 0.9**x),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=8),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.MultiStepLR(o, [2]), schedules.ExponentialLR(o, 0.9)], o
    ),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=2), schedules.MultiStepLR(o, [1, 3])], [2]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=3),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
    "SparseAdam": {},
    "Muon": {},
}
# It needs a closure, which a step here does not have.
REFUSED = {"LBFGS", "Optimizer"}


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 3, sparse=True)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.embed((x > 0).long()).sum(1)
        return nn.functional.cross_entropy(logits, labels), logits


def make(
    folder: Path, make_optimizer: Make, make_schedule: Make, *callbacks: TrainerCallback, model: Any = None
) -> Trainer:
    set_seed(1)
    model = model() if model else Net(dropout=0.2)
    optimizer = make_optimizer(model)
    options = {"eval_strategy": "steps", "eval_steps": 1, "max_grad_norm": 0.0}
    return make_trainer(
        folder, model, eval_dataset=make_rows(6, seed=2), callbacks=list(callbacks),
        optimizers=(optimizer, make_schedule(optimizer)), max_steps=7, save_strategy="steps", save_steps=100, **options,
    )  # fmt: skip


def check(tmp_path: Path, make_optimizer: Make, make_schedule: Make, model: Any = None) -> None:
    def make_one(folder: Path, *callbacks: TrainerCallback) -> Trainer:
        return make(folder, make_optimizer, make_schedule, *callbacks, model=model)

    check_resumes(make_one, tmp_path, [3])


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_of_torch_resumes_exactly(tmp_path: Path, name: str) -> None:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    state = SCHEDULES[name](make_optimizer(Net())).state_dict()
    if any(map(inspect.isfunction, state.values())):  # SWALR's of torch 2.9
        with pytest.raises(ConfigError, match="without running code"):
            make(tmp_path, make_optimizer, SCHEDULES[name]).train()
        return
    check(tmp_path, make_optimizer, SCHEDULES[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_of_torch_resumes_exactly_with_milestones(tmp_path: Path, name: str) -> None:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        for parameter in model.parameters():
            # Muon takes matrices alone.
            parameter.requires_grad_(name != "Muon" or parameter.dim() == 2)
        parameters = [p for p in model.parameters() if p.requires_grad]
        return getattr(torch.optim, name)(parameters, lr=0.01, **OPTIMIZERS[name])

    check(tmp_path, make_optimizer, SCHEDULES["MultiStepLR"], model=Sparse if name == "SparseAdam" else None)


def test_nothing_of_torch_is_forgotten() -> None:
    known = {name.split()[0] for name in SCHEDULES} | {"LRScheduler", "SWALR"}
    assert {name for name in schedules.__all__ if name[0].isupper()} <= known
    found = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    assert found <= OPTIMIZERS.keys() | REFUSED
