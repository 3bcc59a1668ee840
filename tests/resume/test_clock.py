"""Runs whose clock goes back, or forward and back: nothing committed is passed over or deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.remote import URL
from support.resuming import StopAt, assert_same, outcome
from support.tiny import make_resumable

from hftrain import SavePolicy, TrainerCallback
from hftrain.checkpoint.layout import checkpoint_step
from hftrain.storage.remote import RemoteFolder, is_url, mirror_of

pytestmark = pytest.mark.usefixtures("store")


class Clock(TrainerCallback):
    """Set the clock that names the time of a commit: to the first number until step 4, to the second from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: float, after: float) -> None:
        self.times, self.now_s = (before, after), before
        monkeypatch.setattr("hftrain.checkpoint.manager.time.time", lambda: self.now_s)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.now_s = self.times[state.global_step >= 4]


class Begin(TrainerCallback):
    """Note at which step a training begins."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


def steps_in(folder: Any) -> list[int]:
    names = RemoteFolder(folder).names() if is_url(folder) else [path.name for path in Path(folder).iterdir()]
    return sorted(step for name in names if (step := checkpoint_step(name)) is not None)


def make(folder: Any, *callbacks: Any, **options: Any) -> Any:
    defaults = {"save_steps": 1, "max_steps": 8, "save_total_limit": 2}
    return make_resumable(folder, *callbacks, **{**defaults, **options})


@pytest.mark.parametrize("save_async", [False, True], ids=["waits", "async"])
@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.parametrize("times", [(900.0, 100.0), (9e9, 100.0), (100.0, 9e9)], ids=["back", "jump", "forward"])
def test_a_run_whose_clock_jumps_resumes_where_it_was(tmp_path, monkeypatch, where, times, save_async):
    folder = tmp_path / "run" if where == "local" else URL
    policy = SavePolicy(save_async=save_async)
    whole = make(tmp_path / "whole")
    whole.train()
    make(folder, StopAt(6), Clock(monkeypatch, *times), save_policy=policy).train()
    assert steps_in(folder) == [5, 6]
    if where == "remote":
        assert steps_in(mirror_of(URL)) == [6]
    # The machine that goes on has yet another time.
    resumed = make(folder, Clock(monkeypatch, 50.0, 40.0), save_policy=policy)
    begin = Begin()
    resumed.add_callback(begin)
    resumed.train(resume_from_checkpoint=True)
    assert begin.steps == [6]
    assert steps_in(folder) == [7, 8]
    assert_same(outcome(resumed), outcome(whole))


def test_a_run_begun_again_is_not_taken_for_the_abandoned_one(tmp_path, monkeypatch):
    make(tmp_path, StopAt(6), Clock(monkeypatch, 900.0, 900.0)).train()
    make(tmp_path, StopAt(2), Clock(monkeypatch, 100.0, 100.0)).train()
    assert steps_in(tmp_path) == [1, 2, 5, 6]
    resumed = make(tmp_path, StopAt(3))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    assert steps_in(tmp_path) == [2, 3, 5, 6]


@pytest.mark.parametrize("policy", [SavePolicy(), SavePolicy(keep_best=1)], ids=["best", "keep_best"])
def test_the_best_checkpoint_is_kept_and_loaded(tmp_path, monkeypatch, policy):
    trainer = make(
        tmp_path,
        Clock(monkeypatch, 900.0, 100.0),
        save_policy=policy,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        learning_rate=0.5,
    )
    trainer.train()
    best = trainer.state.best_global_step
    assert best != 8
    assert steps_in(tmp_path) == sorted({best, 8})
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)


def test_a_full_disk_costs_the_oldest(tmp_path, monkeypatch):
    policy = SavePolicy(on_full_disk="prune")
    trainer = make(tmp_path, Clock(monkeypatch, 900.0, 100.0), save_policy=policy, save_total_limit=None)
    free = iter([1 << 40] * 4 + [0])
    monkeypatch.setattr("hftrain.run.writing.free_bytes", lambda _: next(free, 1 << 40))
    monkeypatch.setattr("hftrain.checkpoint.manager.free_bytes", lambda _: 1 << 40)
    trainer.train()
    assert steps_in(tmp_path) == [2, 3, 4, 5, 6, 7, 8]
