"""Where a run is, what callbacks ask, and when things are due."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hftrain.core.progress import Cadence, Progress, TrainerControl


def test_progress_comes_back_from_plain_integers() -> None:
    state = Progress(step=3, epoch=1, micro_steps_in_epoch=2, samples=24, tokens=5).state_dict()
    assert state == {"step": 3, "epoch": 1, "micro_steps_in_epoch": 2, "samples": 24, "tokens": 5,
                     "offset_in_epoch": 0, "cut_epochs": 0}  # fmt: skip
    progress = Progress(samples=9)
    progress.load_state_dict({**state, "step": 4.0})  # type: ignore[dict-item]
    assert progress == Progress(step=4, epoch=1, micro_steps_in_epoch=2, samples=24, tokens=5)
    assert type(progress.step) is int


def test_progress_refuses_a_counter_it_does_not_have() -> None:
    with pytest.raises(AttributeError, match="laps"):
        Progress().load_state_dict({"laps": 1})


def test_control_sets_named_flags_only() -> None:
    control = TrainerControl(should_log=True)
    control.update({"should_save": 1, "should_log": False})
    assert control == TrainerControl(should_save=True)
    assert control.should_save is True


def test_control_is_stored_in_the_documented_form() -> None:
    control = TrainerControl(should_save=True)
    state = control.state()
    assert state == {"args": {f.name: f.name == "should_save" for f in dataclasses.fields(control)}, "attributes": {}}
    state["args"]["should_save"] = False
    assert control.should_save


@pytest.mark.parametrize(
    ("cadence", "due"),
    [
        ({}, []),
        ({"unit": "steps"}, []),
        ({"unit": "steps", "every": 1}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"unit": "steps", "every": 3}, [3, 6, 9]),
        ({"unit": "steps", "every": 3, "delay": 6}, [6, 9]),
        ({"unit": "steps", "every": 3, "delay": 6.5}, [9]),
        ({"unit": "steps", "every": 100}, []),
        ({"unit": "epoch", "every": 1}, []),
        ({"unit": "best", "every": 1}, []),
        ({"unit": "no", "every": 1}, []),
    ],
)
def test_steps_at_which_something_is_due(cadence: dict[str, Any], due: list[int]) -> None:
    assert [step for step in range(1, 10) if Cadence(**cadence).is_due_at_step(step)] == due


@pytest.mark.parametrize(
    ("cadence", "due"),
    [
        ({"unit": "epoch"}, [0.5, 1, 2]),
        ({"unit": "epoch", "delay": 1}, [1, 2]),
        ({"unit": "epoch", "delay": 1.5}, [2]),
        ({"unit": "steps", "every": 1}, []),
        ({"unit": "best"}, []),
        ({}, []),
    ],
)
def test_epochs_at_whose_end_something_is_due(cadence: dict[str, Any], due: list[float]) -> None:
    assert [epoch for epoch in (0.5, 1, 2) if Cadence(**cadence).is_due_at_epoch(epoch)] == due
