"""Runs whose lengths and intervals are written with a unit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from support.resuming import StopAt, check_resumes
from support.tiny import Net, make_resumable, make_rows, make_trainer

from hftrain import EvalSet, TrainerCallback, set_seed
from hftrain.core.errors import ConfigError
from hftrain.extras import intervals


class Counted(Net):
    main_input_name = "x"


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 10
        return self.now_s


def evaluated(trainer: Any) -> list[int]:
    return [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


# 24 samples in batches of 4: 6 updates and 96 tokens a pass, 3 passes.
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("0.5ep", [3, 6, 9, 12, 15, 18]),
        ("2ep", [12, 18]),
        ("7ba", [7, 14, 18]),
        ("0.25dur", [5, 10, 15, 18]),
        ("100tok", [7, 13, 18]),
    ],
)
def test_evaluations_and_saves_are_where_the_text_says(tmp_path: Path, steps: str, expected: list[int]) -> None:
    trainer = make_trainer(
        tmp_path,
        Counted(),
        train_dataset=make_rows(24),
        eval_dataset=make_rows(4),
        num_train_epochs="3ep",
        eval_strategy="steps",
        eval_steps=steps,
        save_strategy="steps",
        save_steps=steps,
        include_num_input_tokens_seen="all",
    )
    trainer.train()
    assert trainer.state.max_steps == 18
    assert evaluated(trainer) == saved(tmp_path) == expected


@pytest.mark.parametrize("steps", ["0.5ep", "100tok"])
def test_run_resumes_exactly_twice(tmp_path: Path, steps: str) -> None:
    options = {
        "train_dataset": make_rows(24),
        "eval_strategy": "steps",
        "eval_steps": steps,
        "num_train_epochs": 3,
        "logging_steps": 3,
        "include_num_input_tokens_seen": "all",
    }
    # 7 and 8 are between two logs; the tokens that the first has not read yet make the 100 full.
    set_seed(3)
    first = Counted(dropout=0.2)
    whole, parts = check_resumes(
        lambda folder, *stop: make_resumable(folder, *stop, model=copy.deepcopy(first), **options), tmp_path, [7, 8]
    )
    assert evaluated(parts) == evaluated(whole)


def test_time_ends_a_run_with_a_checkpoint_over_all_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "time", Clock())
    options = {"max_time": "3min", "num_train_epochs": 10}
    first = make_resumable(tmp_path, StopAt(8), **options)
    first.train()
    second = make_resumable(tmp_path, **options)
    second.train(resume_from_checkpoint=True)
    assert 14 <= second.state.global_step <= 18
    assert saved(tmp_path)[-1] == second.state.global_step
    # The schedule is that of the whole run.
    assert second.state.max_steps == 60
    third = make_resumable(tmp_path, **{**options, "max_time": "1h"})
    third.train(resume_from_checkpoint=True)
    assert third.state.global_step == 60


def test_tokens_end_a_run(tmp_path: Path) -> None:
    options = {"max_time": "100tok", "include_num_input_tokens_seen": "all", "num_train_epochs": 10}
    trainer = make_trainer(tmp_path, Counted(), **options)
    trainer.train()
    assert trainer.state.global_step == 7


def test_time_is_one_interval_for_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "time", Clock())
    trainer = make_trainer(tmp_path, logging_steps="35s", max_steps="10ba")
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history[:-1]] == [4, 7]


@pytest.mark.parametrize(
    "options",
    [
        {"max_time": "10ep"},
        {"max_time": 3600},
        {"max_time": "100tok"},
        {"eval_strategy": "steps", "eval_steps": "100tok"},
        {"max_time": "9tok", "include_num_input_tokens_seen": "all", "logging_strategy": "no"},
        {
            "eval_strategy": "steps",
            "eval_steps": "0.5ep",
            "eval_dataset": {"a": EvalSet(make_rows(4), every=10)},
        },
    ],
)
def test_what_cannot_be_counted_is_refused_at_once(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_trainer(tmp_path, **{"eval_dataset": make_rows(4), **options})


def test_numbers_add_no_callback(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": "5ba", "save_steps": "0.1dur", "eval_dataset": make_rows(4)}
    found: list[TrainerCallback] = make_trainer(tmp_path, **options).callback_handler.callbacks
    assert not any(isinstance(each, intervals.IntervalCallback) for each in found)
