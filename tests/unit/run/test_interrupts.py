"""What a training of one process does when it is asked to save or to stop; several: tests/guarantees."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.resuming import assert_same, comparable, outcome
from support.tiny import Noisy, at, make_resumable, make_rows, train

from hftrain import EarlyStoppingCallback, SavePolicy, StrategyError, Trainer, TrainerCallback
from hftrain.checkpoint.manifest import list_checkpoints, read_manifest
from hftrain.preemption.consensus import Consensus
from hftrain.preemption.grace import GracePeriod
from hftrain.preemption.signals import TrainingStopped
from hftrain.run.parts import make_manager

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has other signals")


class Send(TrainerCallback):
    """Send this process a signal at an event of a step."""

    def __init__(self, name: str, step: int, event: str = "on_step_end") -> None:
        self.name, self.step, self.events = name, step, []
        setattr(self, event, self._send)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("on_train_end")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do nothing; replaced on the instance."""

    on_evaluate = on_epoch_end = on_step_end

    def _send(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.Signals[self.name])


make_trainer = partial(make_resumable, seed=5, max_steps=10)


def steps_in(folder: Path) -> list[int]:
    return [read_manifest(path).step for path in list_checkpoints(folder)]


@pytest.mark.parametrize(("name", "error"), [("SIGTERM", TrainingStopped), ("SIGINT", KeyboardInterrupt)])
def test_signal_stops_at_the_step_boundary_with_checkpoint_and_marker(
    tmp_path: Path, name: str, error: type[BaseException]
) -> None:
    send = Send(name, 4)
    with pytest.raises(error, match=f"{name} stopped the training after step 4 of 10. The last checkpoint is check"):
        make_trainer(tmp_path, send).train()
    assert steps_in(tmp_path) == [4]
    assert send.events == ["on_train_end"]
    marker = json.loads((tmp_path / "requeue.json").read_text())
    assert (marker["signal"], marker["step"], marker["checkpoint"]) == (name, 4, "checkpoint-4")
    resumed = make_trainer(tmp_path, resume_from_checkpoint="auto")
    assert resumed.train().global_step == 10
    assert not (tmp_path / "requeue.json").exists()
    assert [entry["step"] for entry in resumed.state.log_history[:10]] == [*range(1, 11)]


def test_stop_is_one_also_where_the_marker_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hftrain.run.interrupts.write_text", full)
    send = Send("SIGTERM", 4)
    with pytest.raises(TrainingStopped, match="The last checkpoint is checkpoint-4"):
        make_trainer(tmp_path, send).train()
    assert send.events == ["on_train_end"]
    assert "requeue.json cannot request a requeue" in caplog.text


def test_sigusr1_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, Send("SIGUSR1", 4)).train().global_step == 10
    assert steps_in(tmp_path) == [4, 10]
    assert not (tmp_path / "requeue.json").exists()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_without_saving_a_signal_saves_nothing_and_says_so(tmp_path: Path, name: str) -> None:
    trainer = make_trainer(tmp_path / "run", Send(name, 4), save_strategy="no")
    ends = nullcontext() if name == "SIGUSR1" else pytest.raises(TrainingStopped, match="No checkpoint was saved")
    with ends, pytest.warns(UserWarning, match="The requested save is skipped: save_strategy='no'"):
        trainer.train()
    assert trainer.state.global_step == (10 if name == "SIGUSR1" else 4)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@pytest.mark.parametrize("event", ["on_step_end", "on_evaluate"])
def test_stop_does_not_wait_for_an_evaluation_which_the_resumed_run_does_first(
    tmp_path: Path, strategy: str, event: str
) -> None:
    options: dict[str, Any] = {
        "eval_strategy": strategy, "eval_steps": 3 if strategy == "steps" else None, "save_strategy": strategy,
        "save_steps": 3, "max_steps": 14,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "train_dataset": Noisy(make_rows()),
    }  # fmt: skip
    whole = make_trainer(tmp_path / "whole", **options)
    whole.train()
    step = 9 if strategy == "steps" else 6  # within a pass, and at its end
    stopped = make_trainer(tmp_path / "run", Send("SIGTERM", step, event), **options)
    with pytest.raises(TrainingStopped):
        stopped.train()
    if event == "on_step_end":
        assert all(entry.get("step") != step or "eval_loss" not in entry for entry in stopped.state.log_history)
    # It dies before it has read a batch, and what it has saved until then is resumed.
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path / "run", at("on_step_begin", lambda *_, **__: 1 / 0), **options).train("auto")
    resumed = make_trainer(tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint="auto")
    assert_same(outcome(resumed), outcome(whole))
    assert resumed.state.best_global_step == whole.state.best_global_step
    assert {*steps_in(tmp_path / "whole")} <= {*steps_in(tmp_path / "run")}


def test_early_stopping_by_the_evaluation_that_was_left_ends_the_resumed_run_there(tmp_path: Path) -> None:
    def make(folder: str, *callbacks: Any) -> Trainer:
        return make_trainer(
            tmp_path / folder, EarlyStoppingCallback(1, early_stopping_threshold=10.0), *callbacks, max_steps=14,
            eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        )  # fmt: skip

    whole = make("whole")
    whole.train()
    assert whole.state.global_step == 4
    with pytest.raises(TrainingStopped):
        make("run", Send("SIGTERM", 4)).train()
    resumed = make("run")
    assert resumed.train(resume_from_checkpoint="auto").global_step == 4
    assert comparable(resumed.state.log_history) == comparable(whole.state.log_history)


def test_signal_in_the_last_step_ends_the_process_after_the_run_is_complete(tmp_path: Path) -> None:
    send = Send("SIGTERM", 10)
    with pytest.raises(TrainingStopped, match=r"when it was complete\. The last checkpoint is checkpoint-10"):
        make_trainer(tmp_path, send).train()
    assert send.events == ["on_train_end"]
    assert (tmp_path / "requeue.json").exists()
    assert make_trainer(tmp_path).train(resume_from_checkpoint="auto").global_step == 10


def test_switched_off_signals_act_as_ever(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        make_trainer(tmp_path, Send("SIGINT", 4), save_policy=SavePolicy(on_signal=False)).train()
    assert str(caught.value) == ""
    assert steps_in(tmp_path) == []


def test_the_clock_saves_also_where_nothing_else_does(tmp_path: Path) -> None:
    class Slow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            time.sleep(0.15)

    seldom, often = SavePolicy(every_s=3600), SavePolicy(every_s=0.25)
    make_trainer(tmp_path / "seldom", Slow(), save_policy=seldom, save_strategy="no").train()
    assert len(steps_in(tmp_path / "seldom")) <= 1
    make_trainer(tmp_path, Slow(), save_policy=often, save_strategy="no").train()
    assert len(steps_in(tmp_path)) >= 2  # how many depends on how busy the machine is
    assert make_trainer(tmp_path, save_policy=often).train(resume_from_checkpoint="auto").global_step == 10


def test_processes_without_a_board_leave_signals_alone_and_refuse_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that share no store, as under MPI, are pretended: the settings are all that is looked at."""

    from hftrain.run.interrupts import Interrupts

    def refuse() -> None:
        raise StrategyError("They share no store.")

    def make(policy: SavePolicy) -> Interrupts:
        trainer = make_trainer(tmp_path, save_policy=policy)
        monkeypatch.setattr(trainer.strategy, "world_size", 2)
        monkeypatch.setattr(trainer.strategy, "make_board", refuse)
        parts = trainer._trainer_parts
        saver: Any = SimpleNamespace(manager=make_manager(trainer, parts.hooks, parts.output))
        return Interrupts(parts.for_run(None), saver, GracePeriod(None))

    with pytest.warns(UserWarning, match="Signals act as if no training ran. They share no store"):
        assert make(SavePolicy()).consensus is None
    with pytest.raises(StrategyError):
        make(SavePolicy(every_s=60))


def test_a_signal_noted_after_the_last_look_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look, first = Consensus.unhandled_stop, [True]
    monkeypatch.setattr(Consensus, "unhandled_stop", lambda self: None if first and first.pop() else look(self))
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, Send("SIGINT", 10)).train()


@pytest.mark.parametrize("greater", [False, True])
def test_rotation_keeps_the_best_checkpoints_and_the_newest(tmp_path: Path, greater: bool) -> None:
    values = iter([0.5, 0.2, 0.4, float("nan"), 0.3, 0.4])
    train(
        tmp_path, train_dataset=make_rows(22), eval_dataset=make_rows(4),
        compute_metrics=lambda _: {"score": next(values)}, save_policy=SavePolicy(keep_best=3), max_steps=12,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=1, metric_for_best_model="score",
        greater_is_better=greater,
    )  # fmt: skip
    # By step: 2: 0.5, 4: 0.2, 6: 0.4, 8: NaN, 10: 0.3, 12: 0.4; of equals the earlier.
    assert steps_in(tmp_path) == ([2, 6, 12] if greater else [4, 6, 10, 12])


def test_auto_resumes_what_is_valid_and_else_starts_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="hftrain")
    assert make_trainer(tmp_path, max_steps=3).train(resume_from_checkpoint="auto").global_step == 3
    assert "'auto' found nothing valid to resume" in caplog.text
    resumed = make_trainer(tmp_path, max_steps=6, resume_from_checkpoint="auto")
    assert resumed.train().global_step == 6
    assert "'auto' found checkpoint-3 to resume" in caplog.text
    assert len([entry for entry in resumed.state.log_history if "loss" in entry]) == 6
    anew = make_trainer(tmp_path, max_steps=2, resume_from_checkpoint="auto")
    assert anew.train(resume_from_checkpoint=False).global_step == 2


def test_path_that_the_script_does_not_pass_on_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, max_steps=2, resume_from_checkpoint="somewhere").train()
    assert "The run starts from the beginning: resume_from_checkpoint='somewhere' is for the script" in caplog.text
    caplog.clear()
    make_trainer(tmp_path, max_steps=2, resume_from_checkpoint="somewhere").train(resume_from_checkpoint=False)
    assert "starts from the beginning" not in caplog.text
