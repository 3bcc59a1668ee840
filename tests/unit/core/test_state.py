"""The documented state file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hftrain.core.state import TrainerState


def make_state() -> TrainerState:
    return TrainerState(
        epoch=1.25,
        global_step=10,
        max_steps=16,
        train_batch_size=4,
        log_history=[{"loss": 0.5, "step": 10}, {"eval_loss": 1.0, "step": 10}],
        best_metric=0.25,
        best_global_step=5,
        best_model_checkpoint="out/checkpoint-5",
        trial_params={"learning_rate": 1e-3, "optim": "adamw_torch", "flag": True},
        stateful_callbacks={"Early": {"args": {"patience": 3}, "attributes": {"count": 1}}},
    )


def test_state_comes_back_from_its_file(tmp_path: Path) -> None:
    path = str(tmp_path / "trainer_state.json")
    make_state().save_to_json(path)
    assert TrainerState.load_from_json(path) == make_state()


def test_json_has_sorted_keys_and_every_field() -> None:
    data = json.loads(make_state().to_json())
    assert list(data) == sorted(data) == sorted(vars(make_state()))


def test_objects_that_others_keep_on_the_state_are_not_written() -> None:
    state = make_state()
    state.table = torch.ones(3)  # type: ignore[attr-defined]
    assert state.to_json() == make_state().to_json()


def test_keys_of_other_versions_are_dropped_and_missing_ones_filled() -> None:
    state = TrainerState.from_dict({"global_step": 3, "from_the_future": [1], "epoch": 0.5})
    assert (state.global_step, state.epoch) == (3, 0.5)
    assert not hasattr(state, "from_the_future")
    assert state.log_history == []


def test_nan_in_the_history_survives() -> None:
    state = TrainerState.from_dict(json.loads(TrainerState(log_history=[{"loss": math.nan}]).to_json()))
    assert math.isnan(state.log_history[0]["loss"])


@pytest.mark.parametrize(
    ("value", "steps"), [(-1, 100), (5, 5), (1, 1), (1.0, 1), (0.1, 10), (0.101, 11), (0.999, 100), (1e-9, 1), (0, 0)]
)
def test_shares_of_the_run_become_steps(value: float, steps: int) -> None:
    state = TrainerState()
    state.compute_steps(SimpleNamespace(logging_steps=value, eval_steps=None, save_steps=7.0), max_steps=100)
    assert (state.logging_steps, state.eval_steps, state.save_steps) == (steps, 500, 7)
    assert isinstance(state.logging_steps, int)
