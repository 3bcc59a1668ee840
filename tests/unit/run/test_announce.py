"""The lines a run and an evaluation begin with."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.tiny import make_rows


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().strip() for record in caplog.records if record.levelno == logging.INFO]


make_trainer = partial(tiny.make_trainer, log_level="info", eval_dataset=make_rows(7))


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    # The police want the level back that log_level sets.
    caplog.set_level(logging.INFO, "hftrain")


def test_run_says_what_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, gradient_accumulation_steps=2).train()
    said = lines(caplog)
    begin = said.index("***** Running training *****")
    assert said[begin : begin + 9] == [
        "***** Running training *****",
        "Num examples = 22",
        "Num Epochs = 2",
        "Num update steps per epoch = 3",
        "Instantaneous batch size per device = 4",
        "Total train batch size (w. parallel, distributed & accumulation) = 8",
        "Gradient Accumulation steps = 2",
        "Total optimization steps = 6",
        "Number of trainable parameters = 83",
    ]
    assert said[-1] == "Training completed."


def test_resumed_run_says_where_it_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 8, "max_steps": 8}
    make_trainer(tmp_path, **options).train()
    assert not any("Continuing" in line for line in lines(caplog))
    make_trainer(tmp_path, **{**options, "max_steps": 10}).train(resume_from_checkpoint=True)
    assert "Continuing from the checkpoint: from epoch 1, global step 8" in lines(caplog)
    assert "Passing over the first 2 batches of that epoch" in lines(caplog)
