"""Values with a meaning of their own, next to transformers' Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from support.hub_models import make_model, make_rows, run_options  # noqa: E402

import hftrain  # noqa: E402

pytestmark = pytest.mark.interop

LIBRARIES = (hftrain, transformers)


@pytest.mark.parametrize("logging_steps", [-1, 2])
def test_interval_of_minus_one_is_the_end_of_the_run(tmp_path: Path, logging_steps: int) -> None:
    found = []
    for library in LIBRARIES:
        options = run_options(
            max_steps=3, logging_steps=logging_steps, eval_strategy="steps", eval_steps=-1, save_strategy="steps",
            save_steps=-1,
        )  # fmt: skip
        trainer = library.Trainer(
            make_model("bert"),
            library.TrainingArguments(str(tmp_path / library.__name__), **options),
            train_dataset=make_rows("bert"),
            eval_dataset=make_rows("bert", 4),
        )
        trainer.train()
        found.append([(entry["step"], "loss" in entry, "eval_loss" in entry) for entry in trainer.state.log_history])
    assert found[0] == found[1]
    # transformers saves once all the same, at the end.
    assert [path.name for path in tmp_path.glob("*/checkpoint-*")] == ["checkpoint-3"]
    assert not list(tmp_path.glob("hftrain/checkpoint-*"))


def test_state_that_transformers_wrote_with_an_interval_of_minus_one_is_resumed(tmp_path: Path) -> None:
    for library, max_steps in ((transformers, 2), (hftrain, 3)):
        options = run_options(max_steps=max_steps, save_strategy="steps", save_steps=-1 if max_steps == 2 else 500)
        trainer = library.Trainer(
            make_model("bert"),
            library.TrainingArguments(str(tmp_path), **options),
            train_dataset=make_rows("bert"),
        )
        trainer.train(resume_from_checkpoint=None if library is transformers else str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 3
