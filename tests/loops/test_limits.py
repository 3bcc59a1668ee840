"""Runs on a part of the data: what they read, how they resume, and what their checkpoints and reports say."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.resuming import StopAt, assert_same, check_resumes, outcome
from support.tiny import Reading, Stream, make_resumable, make_rows, make_trainer, share

from hftrain import EvalSet, TrainerCallback
from hftrain.checkpoint.manifest import read_manifest
from hftrain.cli.checkpoints import show_checkpoints
from hftrain.cli.report import show_report
from hftrain.core.errors import CheckpointError, ConfigError, TaskError

LIMITS = [{"limit_train_batches": 3}, {"overfit_batches": 3}, {"limit_train_batches": 0.5, "limit_eval_batches": 1}]


@pytest.mark.parametrize("options", LIMITS)
@pytest.mark.parametrize("workers", [0, 2])
def test_limited_run_resumes_exactly_twice(tmp_path: Path, options: dict[str, Any], workers: int) -> None:
    options = {
        **options,
        "kind": Reading,
        "num_train_epochs": 3,
        "gradient_accumulation_steps": 2,
        "dataloader_num_workers": workers,
        "eval_strategy": "epoch",
    }
    # In the middle of a pass, and at the end of one.
    whole, parts = check_resumes(partial(make_resumable, **options), tmp_path, [1, 4])
    assert whole.state.global_step == whole.state.max_steps == 6
    assert parts.seen == whole.seen[6:]


def test_overfitting_repeats_one_part_and_limiting_does_not(tmp_path: Path) -> None:
    seen = {}
    for name in ("overfit_batches", "limit_train_batches"):
        trainer = make_trainer(tmp_path, kind=Reading, **{name: 2})
        trainer.train()
        seen[name] = trainer.seen
    assert seen["overfit_batches"][:2] == seen["overfit_batches"][2:] == seen["limit_train_batches"][:2]
    assert seen["limit_train_batches"][:2] != seen["limit_train_batches"][2:]


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_gets_a_length(tmp_path: Path, workers: int) -> None:
    options = {"train_dataset": Stream(make_rows()), "limit_train_batches": 2, "dataloader_num_workers": workers}
    trainer = make_trainer(tmp_path, kind=Reading, **options)
    trainer.train()
    assert (trainer.state.max_steps, trainer.state.epoch) == (4, 2.0)
    assert trainer.seen[:2] == trainer.seen[2:]
    with pytest.raises(ConfigError, match="no length"):
        make_trainer(tmp_path, train_dataset=Stream(make_rows()), limit_train_batches=0.5).train()


def test_schedule_and_logs_are_those_of_the_part(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, limit_train_batches=2)
    trainer.train()
    assert trainer.state.max_steps == 4
    assert [entry["learning_rate"] for entry in trainer.state.log_history[:-1]] == [0.01, 0.0075, 0.005, 0.0025]
    assert [entry["epoch"] for entry in trainer.state.log_history[:-1]] == [0.5, 1.0, 1.5, 2.0]


def test_evaluations_read_a_part_and_predictions_all(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_dataset=make_rows(9), limit_eval_batches=2, compute_metrics=share)
    first = make_trainer(tmp_path, trainer.model, eval_dataset=make_rows(9)[:8], compute_metrics=share)
    assert trainer.evaluate()["eval_loss"] == first.evaluate()["eval_loss"]
    assert len(trainer.predict(make_rows(9)).predictions) == 9


def test_checkpoint_report_and_list_say_that_a_run_was_limited(tmp_path: Path) -> None:
    for name, options in {"part": {"limit_train_batches": 2, "limit_eval_batches": 0.5}, "whole": {}}.items():
        make_resumable(tmp_path / name, num_train_epochs=1, **options).train()
        manifest = read_manifest(max((tmp_path / name).glob("checkpoint-*")))
        assert manifest.facts.get("limits", {}) == options
        page = tmp_path / f"{name}.html"
        show_report([str(tmp_path / name)], output=str(page))
        for text in (page.read_text("utf-8"), "\n".join(show_checkpoints(tmp_path / name))):
            assert ("limit" in text) == bool(options)


def test_another_limit_is_not_taken_for_the_same_run(tmp_path: Path) -> None:
    make_resumable(tmp_path, StopAt(1), limit_train_batches=3).train()
    for options in ({}, {"limit_train_batches": 2}, {"overfit_batches": 3}):
        with pytest.raises(CheckpointError, match="limits"):
            make_resumable(tmp_path, **options).train(resume_from_checkpoint=True)
    # The same number of batches is another part of the data.
    with pytest.raises(CheckpointError, match="batch_size"):
        make_resumable(tmp_path, limit_train_batches=3, per_device_train_batch_size=2).train(
            resume_from_checkpoint=True
        )
    make_resumable(tmp_path, limit_train_batches=3, limit_eval_batches=1).train(resume_from_checkpoint=True)


class Noting(TrainerCallback):
    num_batches = 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_batches += 1


@pytest.mark.parametrize("sets", ["one", "several"])
def test_sanity_evaluation_leaves_no_trace(tmp_path: Path, sets: str) -> None:
    rows, calls = make_rows(7, seed=2), list[int]()

    def count(prediction: Any) -> dict[str, float]:
        calls.append(len(prediction.predictions))
        return share(prediction)

    data: Any = rows if sets == "one" else {"a": rows, "b": EvalSet(rows, metrics=count)}
    results = []
    for sanity in (None, 1):
        noting = Noting()
        options = {"eval_dataset": data, "compute_metrics": count, "eval_strategy": "epoch"}
        trainer = make_resumable(tmp_path / str(sanity), noting, sanity_eval_batches=sanity, **options)
        trainer.train()
        results.append((outcome(trainer), noting.num_batches))
    num = 1 if sets == "one" else 2
    assert calls == [7] * 2 * num + [4] * num + [7] * 2 * num
    assert_same(results[1][0], results[0][0])
    assert results[0][1] == results[1][1]


def test_sanity_evaluation_fails_before_the_first_step(tmp_path: Path) -> None:
    def broken(prediction: Any) -> dict[str, float]:
        raise TaskError("It fails.", "", "")

    trainer = make_trainer(
        tmp_path,
        kind=Reading,
        eval_dataset=make_rows(7),
        compute_metrics=broken,
        eval_strategy="epoch",
        sanity_eval_batches=1,
    )
    with pytest.raises(TaskError, match="It fails"):
        trainer.train()
    assert "seen" not in vars(trainer)
    assert trainer.callback_handler.callbacks
