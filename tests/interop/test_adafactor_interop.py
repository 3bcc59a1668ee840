"""transformers' Adafactor in the Trainer, by name and with its own schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny import Net, make_rows, train

transformers = pytest.importorskip("transformers")

from hftrain import Adafactor, AdafactorSchedule, Trainer  # noqa: E402

pytestmark = pytest.mark.interop


def test_adafactor_by_name_is_that_of_transformers(tmp_path: Path) -> None:
    trainer = train(tmp_path, optim="adafactor", optim_args="beta1=0.9", max_steps=2)
    assert isinstance(trainer.optimizer, transformers.Adafactor)
    given = {"scale_parameter": False, "relative_step": False, "beta1": 0.9}
    assert {name: trainer.optimizer.defaults[name] for name in given} == given


def test_adafactor_that_chooses_its_rate_trains_with_its_schedule(tmp_path: Path) -> None:
    net = Net()
    chosen = Adafactor(net.parameters(), warmup_init=True)
    trainer = train(
        tmp_path, net, optimizers=(chosen, AdafactorSchedule(chosen)), max_steps=3, save_strategy="steps", save_steps=2
    )
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates[0] == 0.0
    assert 0 < rates[1] < rates[2] < 1e-5
    again = Net()
    chosen = Adafactor(again.parameters(), warmup_init=True)
    resumed = Trainer(again, trainer.args, train_dataset=make_rows(), optimizers=(chosen, AdafactorSchedule(chosen)))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for ours, theirs in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
