"""Runs whose clock goes back, or forward and back: nothing committed is passed over or deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.remote import URL
from support.resuming import StopAt, assert_same, outcome
from support.tiny import make_resumable

from hftrain import SavePolicy, TrainerCallback
from hftrain.checkpoint.manifest import checkpoint_step
from hftrain.extras.remote.folders import RemoteFolder
from hftrain.storage.files import is_url, mirror_of

pytestmark = pytest.mark.usefixtures("store")


class Clock(TrainerCallback):
    """Set the clock that names the time of a commit: to the first number until step 4, to the second from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: float, after: float) -> None:
        self.times, self.now_s = (before, after), before
        monkeypatch.setattr("hftrain.checkpoint.manager.time.time", lambda: self.now_s)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.now_s = self.times[state.global_step >= 4]


class Begin(TrainerCallback):
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
