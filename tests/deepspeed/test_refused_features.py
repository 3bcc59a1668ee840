"""What needs whole matrices or the gradients themselves is refused under DeepSpeed, before the first update."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from support.optimizer_runs import Words, make_words
from support.tiny import make_arguments

from hftrain import Freeze, GradientClipping, SpikeGuard, StrategyError, Trainer

pytestmark = pytest.mark.deepspeed

FEATURES: dict[str, tuple[Any, str]] = {
    "muon": (None, "flattened"),
    "clipping": (GradientClipping("value", 1.0), "engine"),
    "freezing": (Freeze("embed"), "engine"),
    "spikes": (SpikeGuard("skip"), "engine"),
}


def train_each(folder: str) -> dict[str, int]:
    """Return how many updates each run that is refused made."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed's use of torch
    found = {}
    for stage in (1, 2, 3):
        for name, (callback, reason) in FEATURES.items():
            arguments = make_arguments(
                Path(folder), optim="muon" if name == "muon" else "sgd", max_steps=2, max_grad_norm=0.0,
                deepspeed={"zero_optimization": {"stage": stage}},
            )  # fmt: skip
            trainer = Trainer(Words(), arguments, train_dataset=make_words(), callbacks=[callback] if callback else [])
            with pytest.raises(StrategyError, match=reason):
                trainer.train()
            found[f"{stage} {name}"] = trainer.state.global_step
            trainer.strategy.close()
    return found


def test_every_stage_refuses(tmp_path: Path, run_distributed: Any) -> None:
    for found in run_distributed(train_each, folder=str(tmp_path)):
        assert len(found) == 12
        assert set(found.values()) == {0}
