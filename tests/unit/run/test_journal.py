"""`journal.jsonl`: what it holds after a run, a stop, a kill, a full disk, and how it is read."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.tiny import Task, make_arguments, make_rows

from hftrain import Trainer, TrainerCallback
from hftrain.checkpoint.manifest import JOURNAL
from hftrain.cli.runs import THROUGHPUT, read_run
from hftrain.extras.hub.files import output_files


def make(folder: Path | str, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    settings = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", **settings}
    arguments = make_arguments(folder, **{"save_steps": 3, **settings})
    rows = {"train_dataset": make_rows(8), "eval_dataset": make_rows(4)}
    return Trainer(Task(), arguments, **rows, callbacks=list(callbacks))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]


class At(TrainerCallback):
    """Do something after a step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act(control)


def fail(control: Any) -> None:
    raise ZeroDivisionError("of the test")


def test_journal_holds_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path, learning_rate=0.25, hub_token="secret")
    trainer.train()
    found = lines(tmp_path)
    begin, *middle, end = found
    assert begin["event"] == "begin"
    assert (begin["step"], begin["resumed_from"], begin["num_logged"]) == (0, None, 0)
    assert begin["arguments"]["learning_rate"] == 0.25
    assert "weight_decay" not in begin["arguments"]
    assert "secret" not in (tmp_path / JOURNAL).read_text()
    assert begin["environment"]["processes"] == begin["environment"]["hosts"] == 1
    assert [each["entry"] for each in middle if each["event"] == "log"] == trainer.state.log_history
    saves = [(each["name"], each["size"]) for each in middle if each["event"] == "save"]
    folders = [tmp_path / name for name in ("checkpoint-3", "checkpoint-6")]
    assert saves == [(each.name, sum(file.stat().st_size for file in each.iterdir())) for each in folders]
    assert (end["event"], end["step"], end["reason"]) == ("end", 6, None)
    assert [each["at"] for each in found] == sorted(each["at"] for each in found)
    assert JOURNAL not in output_files(tmp_path)


def test_run_without_a_checkpoint_leaves_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        make(tmp_path, At(2, fail)).train()
    assert list(tmp_path.iterdir()) == []
    make(tmp_path).train()
    assert [each["event"] for each in lines(tmp_path)].count("begin") == 1


def test_run_that_begins_in_a_folder_with_files_is_noted_from_its_start(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ZeroDivisionError):
        make(tmp_path, At(2, fail)).train()
    assert [each["event"] for each in lines(tmp_path)] == ["begin", "log", "end"]


def test_time_of_evaluations_and_saves_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("hftrain.run.journal.time.perf_counter", lambda: clock[0])

    class Slow(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            clock[0] += 100
            return super().evaluate(*args, **kwargs)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            clock[0] += 1000
            super()._save_checkpoint(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            clock[0] += 0.5
            return super().training_step(*args, **kwargs)

    trainer = make(tmp_path)
    slow = Slow(Task(), trainer.args, train_dataset=make_rows(8), eval_dataset=make_rows(4))
    slow.train()
    logs = [each for each in lines(tmp_path) if each["event"] == "log" and "loss" in each["entry"]]
    assert [(each["samples"], each["trained_s"]) for each in logs] == [(4 * n, 0.5 * n) for n in range(1, 7)]
    run = read_run(str(tmp_path), name="run")
    assert run.points(THROUGHPUT) == [(step, 8.0) for step in range(1, 7)]


def test_resumed_run_supersedes_what_its_checkpoint_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        make(tmp_path, At(5, fail)).train()
    assert lines(tmp_path)[-1] | {"at": 0} == {
        "event": "end",
        "at": 0,
        "step": 5,
        "reason": "ZeroDivisionError: of the test",
        "is_error": True,
    }
    before = read_run(str(tmp_path), name="run")
    assert [step for step, _ in before.points("loss")] == [1, 2, 3, 4]
    trainer = make(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    begin = [each for each in lines(tmp_path) if each["event"] == "begin"][1]
    assert (begin["step"], begin["resumed_from"]) == (3, "checkpoint-3")
    run = read_run(str(tmp_path), name="run")
    for metric in ("loss", "eval_loss", "grad_norm"):
        logged = [(entry["step"], entry[metric]) for entry in trainer.state.log_history if metric in entry]
        assert run.points(metric) == logged
    assert [session.last_step > session.first_step for session in run.sessions] == [True, True]
    make(tmp_path).train()
    again = read_run(str(tmp_path), name="run")
    assert (again.num_earlier, len(again.sessions)) == (1, 1)


def test_stop_by_a_callback_is_told(tmp_path: Path) -> None:
    make(tmp_path, At(2, lambda control: setattr(control, "should_training_stop", True))).train()
    end = lines(tmp_path)[-1]
    assert (end["step"], end["reason"], end["is_error"]) == (2, "a callback set should_training_stop", False)


def test_log_after_the_training_is_kept(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.train()
    metrics = trainer.evaluate(metric_key_prefix="test")
    assert lines(tmp_path)[-1]["entry"]["test_loss"] == metrics["test_loss"]


def test_killed_run_leaves_what_it_logged(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from unit.run.test_journal import At, make
make(Path(sys.argv[1]), At(5, lambda control: os.kill(os.getpid(), signal.SIGKILL))).train()
"""
    tests = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), str(tests)], env=os.environ, check=False)
    assert done.returncode == -9
    run = read_run(str(tmp_path), name="run")
    assert [step for step, _ in run.points("loss")] == [1, 2, 3, 4], "the checkpoint knows three"
    assert run.events[-1]["event"] == "save"


def test_torn_line_is_passed_over_and_ended(tmp_path: Path) -> None:
    make(tmp_path).train()
    path = tmp_path / JOURNAL
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole[:-1]) + "\n" + whole[-1][:20])
    assert len(read_run(str(tmp_path), name="run").log) == 9
    make(tmp_path).train()
    texts = path.read_text().splitlines()
    assert texts[len(whole) - 1] == whole[-1][:20]
    assert json.loads(texts[len(whole)])["event"] == "begin"


def test_full_disk_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(tmp_path, eval_strategy="no", eval_steps=None, save_steps=2, max_steps=6)
    opened = open

    def full(file: Any, mode: str = "r", **options: Any) -> Any:
        if Path(file).name == JOURNAL and mode == "a" and trainer.state.global_step in (3, 4):
            raise OSError(28, "No space left on device")
        return opened(file, mode, **options)

    monkeypatch.setattr("builtins.open", full)
    with caplog.at_level(logging.WARNING, "hftrain"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert [each.getMessage() for each in caplog.records if JOURNAL in each.getMessage()] == [
        f"Some entries could not be written to {tmp_path / JOURNAL}: [Errno 28] No space left on device. "
        "Training continues."
    ]
    assert [step for step, _ in read_run(str(tmp_path), name="run").points("loss")] == [1, 2, 5, 6]


def test_run_that_saves_nothing_leaves_nothing(tmp_path: Path) -> None:
    make(tmp_path / "out", save_strategy="no").train()
    assert not (tmp_path / "out").exists()


def test_remote_run_continues_the_journal_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "local" not in fsspec.available_protocols():
        pytest.skip("this fsspec has no name for a local store other than that of plain folders")
    url = f"local://{tmp_path}/store/run"
    for machine, resume in (("a", None), ("b", True)):
        monkeypatch.setenv("HFTRAIN_CACHE", str(tmp_path / machine))
        trainer = make(url, max_steps=3 if resume is None else 6)
        trainer.train(resume_from_checkpoint=resume)
    run = read_run(url, name="run")
    assert [each["resumed_from"] for each in run.events if each["event"] == "begin"] == [None, "checkpoint-3"]
    assert [each["step"] for each in run.events if each["event"] == "end"] == [3, 6]
    assert [step for step, _ in run.points("loss")] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(value) for _, value in run.points("loss"))
