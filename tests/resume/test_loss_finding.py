"""What was proved of a loss is part of a checkpoint, and is checked again by the run that continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.kinds import Ordered, PerSample, Shifts, Sums, Words, full_rows, make_model, make_rows
from support.resuming import StopAt, check_resumes
from support.tiny import Rows, make_arguments

from hftrain import Trainer


def late() -> Rows:
    """Return samples that tell what a loss is a mean over in the third step of four alone."""
    rows = full_rows() + full_rows()
    rows[8:12] = make_rows()[:4]
    return rows


def make(folder: Path, kind: type[Words], rows: Rows, *callbacks: Any) -> Trainer:
    arguments = make_arguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=8, save_strategy="steps",
        save_steps=100, learning_rate=0.1,
    )  # fmt: skip
    return Ordered(make_model(kind), arguments, train_dataset=rows, callbacks=list(callbacks))


@pytest.mark.parametrize("kind", [Words, PerSample, Shifts])
@pytest.mark.parametrize("rows", [make_rows, late])
def test_resumed_run_weights_batches_as_the_uninterrupted_one(tmp_path: Path, kind: Any, rows: Any) -> None:
    for stop in (1, 2, 3, 5):
        check_resumes(lambda folder, *stops: make(folder, kind, rows(), *stops), tmp_path / str(stop), [stop])


@pytest.mark.parametrize("changed", [PerSample, Sums])
def test_a_loss_that_has_changed_is_proved_again_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: type[Words]
) -> None:
    make(tmp_path, Words, make_rows(), StopAt(2)).train()
    assert "not that of the checkpoint" not in caplog.text
    resumed = make(tmp_path, changed, make_rows())
    resumed.train(resume_from_checkpoint=True)
    found = resumed._trainer_parts.steps.shares.rule.kind
    assert found is not None
    assert found.what == {PerSample: "samples", Sums: "sum"}[changed]
    assert "not that of the checkpoint" in caplog.text
