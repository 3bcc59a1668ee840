"""Where a run is, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, make_arguments, make_rows, make_trainer

from hftrain import Trainer, TrainerCallback
from hftrain.run.build import report_late_ranks


def test_phases_of_a_run(tmp_path: Path) -> None:
    found: list[str] = []

    class Ask(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            found.append(trainer._trainer_parts.activity.whereabouts())

        on_step_begin = on_prediction_step = on_train_end = on_save = on_train_begin

    trainer = make_trainer(
        tmp_path, eval_dataset=make_rows(4), callbacks=[Ask()], max_steps=2, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2,
    )  # fmt: skip
    assert trainer._trainer_parts.activity.whereabouts() == "between training and evaluations"
    trainer.train()
    assert found == [
        *("set up the training", "train step 1", "train step 2", "evaluate"),
        *("save checkpoint-2", "finish the training"),
    ]
    found.clear()
    trainer.predict(make_rows(4))
    assert found == ["predict"]


def test_a_failed_exchange_is_reported_from_where_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    class Fail(TrainerCallback):
        def on_save(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("gloo: Timed out")

    def report(strategy: Any, error: Exception) -> None:
        found.append(trainer._trainer_parts.activity.whereabouts())

    monkeypatch.setattr("hftrain.run.build.report_late_ranks", report)
    trainer = make_trainer(tmp_path, callbacks=[Fail()], max_steps=2, save_strategy="steps", save_steps=2)
    with pytest.raises(RuntimeError, match="gloo"):
        trainer.train()
    assert found[0] == "save checkpoint-2"


def test_one_process_has_nobody_to_wait_for(tmp_path: Path) -> None:
    report_late_ranks(Trainer(Net(), make_arguments(tmp_path)).strategy, RuntimeError("gloo: Timed out"))
