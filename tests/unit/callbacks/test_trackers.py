"""When a tracker is started, fed and closed, and that it cannot end a training."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support import tiny
from support.tiny import Task, make_arguments, make_rows

from hftrain import Logger, Trainer, TrainerCallback
from hftrain.extras.trackers.callbacks import TrackerCallback
from hftrain.loggers.base import RunFacts


class Recorder(Logger):
    """A tracker that remembers what it is told, and can continue a run."""

    name = "recorder"
    packages = ("hftrain",)

    def __init__(self, *, artifacts: str = "no", failing: tuple[str, ...] = (), continues: bool = True) -> None:
        self.artifacts = artifacts
        self.failing = failing
        self.continues = continues
        self.calls: list[str] = []
        self.facts: list[RunFacts] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.folders: list[str] = []

    def hear(self, what: str) -> None:
        self.calls.append(what)
        if what in self.failing:
            raise OSError(f"no network for {what}")

    def start(self, run: RunFacts) -> None:
        self.hear("start")
        self.facts.append(run)
        self.run_id = run.run_id if run.run_id and self.continues else f"run-{len(self.facts)}-{id(self)}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.hear("log")
        self.rows.append((step, dict(metrics)))

    def log_artifact(self, folder: Path, step: int) -> None:
        self.hear("log_artifact")
        assert (folder / "model.safetensors").exists()
        self.folders.append(folder.name)

    def finish_training(self) -> None:
        self.hear("finish_training")

    def close(self) -> None:
        self.hear("close")


def make_trainer(folder: Path, recorder: Logger | list[Logger], **options: Any) -> Trainer:
    parts = {"train_dataset": make_rows(8), "eval_dataset": make_rows(8), "num_train_epochs": 1, **options}
    return tiny.make_trainer(folder, loggers=recorder, **parts)


def test_run_is_told_of_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make_trainer(tmp_path, recorder, eval_strategy="epoch", run_name="mine", logging_dir="logs")
    assert recorder.calls == []
    trainer.train()
    assert recorder.calls == ["start", "log", "log", "log", "log", "finish_training"]
    assert [step for step, _ in recorder.rows] == [1, 2, 2, 2]
    assert "train/loss" in recorder.rows[0][1]
    assert "eval/loss" in recorder.rows[2][1]
    assert "train/train_runtime" in recorder.rows[3][1]
    (facts,) = recorder.facts
    assert (facts.name, facts.output_dir, facts.logging_dir) == ("mine", str(tmp_path), "logs")
    assert facts.hparams == trainer.args.to_sanitized_dict()
    assert facts.hparams["train_batch_size"] == 4
    assert facts.model is trainer.model
    # A later evaluation and prediction belong to the same run.
    trainer.evaluate()
    trainer.predict(make_rows(8))
    assert recorder.calls[6:] == ["log", "log"]
    assert "test/loss" in recorder.rows[-1][1]


def test_run_starts_with_the_first_log_without_training(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make_trainer(tmp_path, recorder)
    trainer.evaluate()
    assert recorder.calls == ["start", "log"]
    trainer.train()
    assert recorder.calls.count("start") == 1


def test_second_training_is_a_run_of_its_own(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make_trainer(tmp_path, recorder)
    trainer.train()
    trainer.train()
    assert [call for call in recorder.calls if call != "log"] == [
        "start",
        "finish_training",
        "close",
        "start",
        "finish_training",
    ]
    assert recorder.facts[1].run_id is None


class OneRun(Recorder):
    """A tracker with one current run per process, which others join."""

    name = "one_run"
    current: ClassVar[list[str]] = []

    def start(self, run: RunFacts) -> None:
        super().start(run)
        self.is_own = not self.current
        if self.is_own:
            assert self.run_id is not None
            self.current.append(self.run_id)
        self.run_id = self.current[0]

    def close(self) -> None:
        super().close()
        if self.is_own:
            self.current.clear()


def test_training_after_one_that_died_is_a_run_of_its_own(tmp_path: Path) -> None:
    first, second = OneRun(), OneRun()

    class Dies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise ValueError("dies")

    died = make_trainer(tmp_path / "died", first, callbacks=[Dies()])
    with pytest.raises(ValueError, match="dies"):
        died.train()
    make_trainer(tmp_path / "later", second).train()
    assert second.run_id not in (None, first.run_id)
    assert first.calls[-1] == "close"


def test_tracker_is_closed_with_its_trainer(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make_trainer(tmp_path, recorder)
    trainer.train()
    assert "close" not in recorder.calls
    del trainer
    gc.collect()
    assert recorder.calls[-1] == "close"


@pytest.mark.parametrize("restores", [False, True])
def test_resume_continues_the_run_of_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, restores: bool
) -> None:
    first = Recorder()
    make_trainer(tmp_path, first, save_strategy="steps", save_steps=1).train()
    state = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["stateful_callbacks"]["RecorderCallback"]["attributes"] == {"run_id": first.run_id}
    second = Recorder()
    options = {"restore_callback_states_from_checkpoint": restores}
    make_trainer(tmp_path, second, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert (second.facts[0].run_id, second.facts[0].step) == (first.run_id, 1)
    assert second.rows[0][0] == 2
    assert "new run" not in caplog.text


@pytest.mark.parametrize("reason", ["cannot", "fails", "unknown"])
def test_resume_that_cannot_continue_the_run_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    loggers: list[Logger] = [] if reason == "unknown" else [Recorder()]
    make_trainer(tmp_path, loggers, save_strategy="steps", save_steps=1).train()

    class Forgetful(Recorder):
        def start(self, run: RunFacts) -> None:
            if reason == "fails" and run.run_id:
                raise LookupError("there is no such run")
            super().start(run)

    second = Forgetful(continues=False)
    make_trainer(tmp_path, second).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "Tracker recorder starts a new run for the resumed training." in caplog.text
    assert ("there is no such run" in caplog.text) == (reason == "fails")
    assert second.rows[0][0] == 2


@pytest.mark.parametrize(
    ("asked", "folders"), [("checkpoint", ["checkpoint-1", "checkpoint-2"]), ("end", ["checkpoint-2"])]
)
def test_checkpoints_are_uploaded_as_asked(tmp_path: Path, asked: str, folders: list[str]) -> None:
    recorder = Recorder(artifacts=asked)
    make_trainer(tmp_path, recorder, save_strategy="steps", save_steps=1).train()
    assert recorder.folders == folders


def test_best_checkpoint_is_uploaded_at_the_end(tmp_path: Path) -> None:
    recorder = Recorder(artifacts="end")
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    rising = {"metric_for_best_model": "loss", "greater_is_better": True, "load_best_model_at_end": True}
    trainer = make_trainer(tmp_path, recorder, learning_rate=0.05, **options, **rising)
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    assert recorder.folders == [Path(trainer.state.best_model_checkpoint).name]


def test_upload_without_a_checkpoint_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, Recorder(artifacts="end")).train()
    assert "Tracker recorder uploads no model: no checkpoint was saved." in caplog.text


def test_tracker_that_does_not_start_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder, other = Recorder(failing=("start",)), Recorder()
    type_of_other = type("Other", (Recorder,), {"name": "other"})
    other = type_of_other()
    with caplog.at_level(logging.WARNING):
        output = make_trainer(tmp_path, [recorder, other]).train()
    assert output.global_step == 2
    # Closed, in case it had come half way.
    assert recorder.calls == ["start", "close"]
    assert caplog.text.count("Tracker recorder failed (setup): OSError: no network for start. Training continues.") == 1
    assert len(other.rows) == 3


def test_tracker_that_fails_later_is_warned_of_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(failing=("log", "finish_training"))
    assert make_trainer(tmp_path, recorder).train().global_step == 2
    assert recorder.calls.count("log") == 3
    assert caplog.text.count("no network for log") == 1
    assert "Tracker recorder failed 4 times and lacks those entries." in caplog.text


def test_interrupt_from_a_tracker_is_not_swallowed(tmp_path: Path) -> None:
    class Interrupted(Recorder):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, Interrupted()).train()


def test_setup_can_be_extended(tmp_path: Path) -> None:
    class Extended(TrackerCallback):
        def setup(self, args: Any, state: Any, model: Any = None, **kwargs: Any) -> None:
            super().setup(args, state, model, **kwargs)
            self.logger.log({"mine": 1.0}, 0)

    recorder = Recorder()
    rows = make_rows(8)
    callback = Extended(logger=recorder)
    Trainer(Task(), make_arguments(tmp_path), train_dataset=rows, callbacks=[callback]).train()
    assert recorder.rows[0] == (0, {"mine": 1.0})


def train_on_a_rank(folder: str) -> list[str]:
    recorder = Recorder()
    trainer = make_trainer(Path(folder) / os.environ["RANK"], recorder, eval_strategy="epoch")
    trainer.train()
    return recorder.calls


@pytest.mark.distributed
def test_only_the_main_process_reports(tmp_path: Path, run_distributed: Callable[..., list[Any]]) -> None:
    main, other = run_distributed(train_on_a_rank, folder=str(tmp_path))
    assert main[0] == "start"
    assert other == []
