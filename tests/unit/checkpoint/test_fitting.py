"""A state that does not fit is named before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hftrain.checkpoint.fitting import check_optimizer, check_state, group_settings
from hftrain.core.errors import CheckpointError

PATH = Path("out/checkpoint-3/optimizer.pt")


def schedule() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step": 5}, "overwrite 'step'"),
        ({"last_epoch": None}, "'last_epoch' is a NoneType"),
        ({"_step_count": 10**30}, "'_step_count' is a int"),
        ({"last_epoch": "x"}, "'last_epoch' is a str"),
        ({"base_lrs": [0.1, 0.2]}, "'base_lrs' is a list"),
        ({5: 5}, "overwrite 5"),
    ],
)
def test_state_that_would_break_a_schedule_is_refused(change: dict[Any, Any], reason: str) -> None:
    own = schedule().state_dict()
    check_state(PATH, own, schedule(), own=own)
    with pytest.raises(CheckpointError, match=reason):
        check_state(PATH, {**own, **change}, schedule(), own=own)


def test_state_without_what_is_needed_is_refused() -> None:
    own = schedule().state_dict()
    with pytest.raises(CheckpointError, match="no 'last_epoch'"):
        check_state(PATH, {key: own[key] for key in own if key != "last_epoch"}, schedule(), own=own)


def stepped() -> torch.optim.Optimizer:
    parameter = torch.ones(2, 3, requires_grad=True)
    parameter.grad = torch.ones(2, 3)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda optimizer, state: optimizer.param_groups[0].pop("eps"), "'eps' of group 0"),
        (lambda optimizer, state: optimizer.param_groups[0].update(betas=(0.9,)), "'betas' of group 0"),
        (lambda optimizer, state: optimizer.param_groups[0].update(eps=10**30), "'eps' of group 0"),
        (lambda optimizer, state: optimizer.param_groups[0].update(foreach=torch.ones(2)), "'foreach' of group 0"),
        (lambda optimizer, state: optimizer.param_groups[0].update(amsgrad=None), "'amsgrad' of group 0"),
        (lambda optimizer, state: optimizer.param_groups[0].update(maximize=True), "'maximize' of group 0"),
        (lambda optimizer, state: optimizer.param_groups[0].update(lr=-1.0), "Invalid learning rate"),
        (lambda optimizer, state: state.pop("exp_avg"), "has only"),
        (lambda optimizer, state: state.update(exp_avg=torch.ones(3, 2)), "shape of its parameter"),
        (lambda optimizer, state: state.update(exp_avg=1.0), "shape of its parameter"),
        (lambda optimizer, state: state.update(step=-1), "updated -1 times"),
        (lambda optimizer, state: optimizer.state.update(x={}), "not a parameter"),
    ],
)
def test_optimizer_whose_next_step_would_fail_is_refused(change: Any, reason: str) -> None:
    optimizer = stepped()
    before = group_settings(optimizer)
    check_optimizer(PATH, optimizer, before=before)
    change(optimizer, next(iter(optimizer.state.values())))
    with pytest.raises(CheckpointError, match=reason):
        check_optimizer(PATH, optimizer, before=before)
