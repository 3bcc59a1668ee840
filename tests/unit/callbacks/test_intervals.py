from __future__ import annotations

import sys
from typing import Any

import pytest

from hftrain import TrainerControl, TrainerState, TrainingArguments
from hftrain.core.errors import ConfigError
from hftrain.core.lengths import read_length
from hftrain.extras import intervals
from hftrain.extras.intervals import IntervalCallback


class Group:
    """One process, or the main one of several."""

    def __init__(self, world_size: int = 1) -> None:
        self.world_size, self.num_readings = world_size, 0

    def broadcast_object(self, value: Any) -> Any:
        self.num_readings += 1
        return value


class Clock:
    """A clock that tests set."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(intervals, "time", clock)
    return clock


def make(group: Group | None = None, **lengths: str) -> IntervalCallback:
    found = {flag: read_length(text) for flag, text in lengths.items()}
    return IntervalCallback({flag: each for flag, each in found.items() if each}, group or Group())


def run(callback: IntervalCallback, state: TrainerState, steps: Any, *, flag: str) -> list[int]:
    """Return the steps after which the flag was set; a step is 0.25 passes, and 10 tokens that each log reads."""
    args, due = TrainingArguments("out"), []
    callback.on_train_begin(args, state, TrainerControl())
    for step in steps:
        control = TrainerControl()
        state.global_step, state.epoch, state.num_input_tokens_seen = step, step * 0.25, step * 10
        callback.on_step_end(args, state, control)
        callback.on_log(args, state, control, logs={"learning_rate": 0.1})
        due += [step] if getattr(control, flag) else []
    return due


def test_processes_read_the_clock_together_and_seldom(clock: Clock) -> None:
    group = Group(world_size=2)

    def steps() -> Any:
        for step in range(1, 4001):
            clock.now_s += 0.01
            yield step

    due = run(make(group, should_training_stop="30s"), TrainerState(), steps(), flag="should_training_stop")
    assert 3000 <= due[0] <= 3101
    assert group.num_readings < 60


def test_parts_of_passes_of_a_stream_are_refused() -> None:
    with pytest.raises(ConfigError, match="no length"):
        make(should_save="0.5ep").on_train_begin(
            TrainingArguments("out"), TrainerState(num_train_epochs=sys.maxsize), TrainerControl()
        )
