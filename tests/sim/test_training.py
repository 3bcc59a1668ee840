"""Whatever trains gives the CPU's numbers on an accelerator, to the bit where nothing else is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_rows, share
from support.two_devices import numbers, run, run_on_both, weights
from torch import nn

pytestmark = pytest.mark.sim


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.last(self.second(self.first(x).tanh()))
        return nn.functional.cross_entropy(logits, labels), logits


SAME: dict[str, dict[str, Any]] = {
    "plain": {},
    "task": {"model": Task},
    "tied": {"model": Tied},
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"max_grad_norm": 0.05},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "adamw": {"optim": "adamw_torch"},
    "fused": {"optim": "adamw_torch_fused"},
    "adafactor": {"optim": "adafactor"},
    "muon": {"optim": "muon"},
    "schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 3},
    "workers": {"dataloader_num_workers": 2},
    "evaluation": {"eval_strategy": "epoch", "eval_dataset": make_rows(10, seed=2)},
    "metrics": {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": make_rows(10, 2), "compute_metrics": share},
    "checkpoints": {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 2},
    "best": {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "eval_dataset": make_rows(10, seed=2),
    },
    "last batch": {"dataloader_drop_last": True},
    "nan filter": {"logging_nan_inf_filter": False, "logging_steps": 3},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("case", SAME)
def test_numbers_are_the_cpus(tmp_path: Path, case: str) -> None:
    run_on_both(tmp_path, **SAME[case])


CLOSE: dict[str, dict[str, Any]] = {"bf16": {"bf16": True}, "bf16 evaluation": {"bf16_full_eval": True}}


@pytest.mark.parametrize("case", CLOSE)
def test_numbers_are_close_where_the_lists_of_autocast_differ(tmp_path: Path, case: str) -> None:
    options = {"eval_strategy": "epoch", "eval_dataset": make_rows(10, seed=2)}
    run_on_both(tmp_path, tolerance=5e-3, **options, **CLOSE[case])


def test_predictions_are_the_cpus(tmp_path: Path) -> None:
    on_cpu, on_sim = (run(tmp_path / str(use_cpu), use_cpu=use_cpu) for use_cpu in (True, False))
    expected, found = (trainer.predict(make_rows(10, seed=3)) for trainer in (on_cpu, on_sim))
    assert (expected.predictions == found.predictions).all()
    assert expected.metrics["test_loss"] == found.metrics["test_loss"]


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = run(tmp_path, Tied, use_cpu=False).model
    assert model.first.weight is model.second.weight


def test_a_run_with_dropout_resumes_to_the_bit(tmp_path: Path) -> None:
    def dropping() -> Net:
        return Net(dropout=0.3)

    settings: dict[str, Any] = {"use_cpu": False, "save_strategy": "steps", "save_steps": 4}
    whole = run(tmp_path / "a", dropping, **settings)
    resumed = run(tmp_path / "b", dropping, resume=str(tmp_path / "a/checkpoint-4"), **settings)
    for one, other in zip(weights(whole), weights(resumed), strict=True):
        assert torch.equal(one, other)
    assert numbers(resumed)[-3:] == numbers(whole)[-3:]


def test_a_checkpoint_goes_on_on_the_other_device(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    whole = run(tmp_path / "cpu", use_cpu=True, **settings)
    for use_cpu, source in ((False, "cpu"), (True, "sim")):
        folder = tmp_path / ("cpu2" if use_cpu else "sim")
        resumed = run(folder, use_cpu=use_cpu, resume=str(tmp_path / source / "checkpoint-4"), **settings)
        assert all(map(torch.equal, weights(whole), weights(resumed)))


def test_the_second_device_can_be_asked_for(tmp_path: Path, sim: Any) -> None:
    before = sim.num_allocations(0)
    sim.set_device(1)
    try:
        trainer = run(tmp_path, use_cpu=False)
    finally:
        sim.set_device(0)
    assert next(trainer.model.parameters()).device == torch.device("sim:1")
    assert sim.num_allocations(0) == before
