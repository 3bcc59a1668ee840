"""A run that is stopped and resumed, once or twice, equals one that never was, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.resuming import StopAt, assert_same, outcome
from support.tiny import make_resumable, make_rows

from hftrain import Trainer, TrainerCallback


def make_trainer(folder: Path, data: Any, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    return make_resumable(folder, *callbacks, train_dataset=data, **{"logging_steps": 3, **options})


def check_resume(tmp_path: Path, data: Any, stops: tuple[int, ...], **options: Any) -> None:
    undisturbed = make_trainer(tmp_path / "whole", data, **options)
    whole = undisturbed.train()
    for index, step in enumerate(stops):
        part = make_trainer(tmp_path / "parts", data, StopAt(step), **options)
        assert part.train(resume_from_checkpoint=index > 0).global_step == step
    resumed = make_trainer(tmp_path / "parts", data, **options)
    last = resumed.train(resume_from_checkpoint=True)
    assert (last.global_step, last.training_loss) == (whole.global_step, whole.training_loss)
    assert_same(outcome(resumed), outcome(undisturbed))


@pytest.mark.parametrize("names", [("fp16", "bf16"), ("fp32", "fp16")], ids="-".join)
def test_precision_may_change_at_a_resume(
    tmp_path: Path, names: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path, make_rows(22), StopAt(4), precision=names[0]).train()
    resumed = make_trainer(tmp_path, make_rows(22), precision=names[1])
    assert resumed.train(resume_from_checkpoint=True).global_step == 12
    assert f"precision {names[0]} -> {names[1]}" in caplog.text
    assert "sample 16 of 22" in caplog.text
    assert resumed.lr_scheduler.last_epoch == 12 - resumed.precision.logs().get("skipped_steps", 0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resume_in_another_precision_equals_an_undisturbed_run(tmp_path: Path, precision: str) -> None:
    check_resume(tmp_path, make_rows(22), (4,), precision=precision)


def test_order_drawn_from_the_global_generator_is_found_again_after_an_epochs_end(tmp_path: Path) -> None:
    # Saved at an epoch's end, resumed, saved within the next one, resumed.
    options: dict[str, Any] = {"accelerator_config": {"use_seedable_sampler": False}, "num_train_epochs": 3}
    check_resume(tmp_path, make_rows(22), (6, 8), **options)
    save = {**options, "save_strategy": "epoch"}
    whole = make_trainer(tmp_path / "epochs", make_rows(22), **save)
    whole.train()
    again = make_trainer(tmp_path / "epochs", make_rows(22), StopAt(8), **save)
    again.train(resume_from_checkpoint=str(tmp_path / "epochs" / "checkpoint-6"))
    last = make_trainer(tmp_path / "epochs", make_rows(22), **save)
    last.train(resume_from_checkpoint=str(tmp_path / "epochs" / "checkpoint-8"))
    assert_same(outcome(last), outcome(whole))
