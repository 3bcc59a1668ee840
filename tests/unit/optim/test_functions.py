"""The documented functions of schedules, and the optimizer that chooses its own rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows, train
from torch import nn
from torch.optim import SGD

import hftrain
from hftrain import Adafactor, AdafactorSchedule, ConfigError, GreedyLR, Trainer, get_scheduler


def optimizer(lr: float = 1.0) -> SGD:
    return SGD([nn.Parameter(torch.ones(1))], lr=lr)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("linear", {}, "num_warmup_steps"),
        ("linear", {"num_warmup_steps": 1}, "num_training_steps"),
        ("constant_with_warmup", {}, "num_warmup_steps"),
        ("linaer", {}, "Did you mean 'linear'"),
        ("constant", {"scheduler_specific_kwargs": {"power": 2}}, "power"),
        ("greedy", {"scheduler_specific_kwargs": {"last_epoch": 2}}, "'last_epoch'"),
    ],
)
def test_get_scheduler_refuses_what_is_missing_or_unknown(name: str, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_scheduler(name, optimizer(), **given)


@pytest.mark.parametrize("name", ["constant_with_warmup", "inverse_sqrt"])
def test_get_scheduler_asks_for_no_length_where_none_matters(name: str) -> None:
    assert get_scheduler(name, optimizer(), num_warmup_steps=1).optimizer.param_groups[0]["initial_lr"] == 1.0


def test_schedule_goes_on_where_it_was() -> None:
    new = optimizer()
    schedule = hftrain.get_linear_schedule_with_warmup(new, 0, 4)
    for _ in range(2):
        new.step()
        schedule.step()
    again = optimizer()
    again.param_groups[0]["initial_lr"] = 1.0
    hftrain.get_linear_schedule_with_warmup(again, 0, 4, last_epoch=1)
    assert again.param_groups[0]["lr"] == new.param_groups[0]["lr"] == 0.5


def test_wsd_needs_a_length_and_a_schedule_that_follows_a_metric_none() -> None:
    with pytest.raises(ConfigError, match="num_stable_steps"):
        hftrain.get_wsd_schedule(optimizer(), 1, 1)
    with pytest.raises(ConfigError, match="'num_training_steps'"):
        hftrain.get_reduce_on_plateau_schedule(optimizer(), num_training_steps=2)


@pytest.mark.parametrize("given", [{"lr": 0.1}, {"warmup_init": True, "relative_step": False}])
def test_adafactor_refuses_settings_that_contradict(given: Any) -> None:
    with pytest.raises(ValueError, match="Cannot use Adafactor"):
        Adafactor([nn.Parameter(torch.ones(1))], **given)


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


def test_greedy_follows_the_evaluations_and_is_resumed(tmp_path: Path) -> None:
    options = {"patience": 0, "min_lr": 1e-4, "factor": 0.5, "threshold": 10.0}
    arguments: dict[str, Any] = {
        "max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2,
        "lr_scheduler_type": "greedy", "lr_scheduler_kwargs": options,
    }  # fmt: skip
    trainer = train(tmp_path, eval_dataset=make_rows(5), **arguments)
    assert isinstance(trainer.lr_scheduler, GreedyLR)
    # The first loss beats infinity, and none of the others beats it by 10.
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(2e-2 / 8)
    resumed = train(tmp_path, eval_dataset=make_rows(5), **arguments, resume=str(tmp_path / "checkpoint-2"))
    assert resumed.lr_scheduler.state_dict() == trainer.lr_scheduler.state_dict()


def test_greedy_needs_evaluations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="follows an evaluation metric"):
        make_arguments(tmp_path, lr_scheduler_type="greedy")
    with pytest.raises(ValueError, match="max_lr has 2 values"):
        GreedyLR(optimizer(), max_lr=[1.0, 1.0])
