"""Values with a meaning of their own, next to transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from support.hub_models import make_model, make_rows, run_options  # noqa: E402
from torch import nn  # noqa: E402

import hftrain  # noqa: E402

pytestmark = pytest.mark.interop

LIBRARIES = (hftrain, transformers)
MARK = "non-None value to disable scaling"


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_marked_loss_is_left_as_it_is(tmp_path: Path) -> None:
    found = []
    for library in LIBRARIES:

        class Divides(library.Trainer):  # type: ignore[name-defined, misc]
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
            ) -> Any:
                labels = inputs.pop("labels")
                outputs = model(**inputs)
                loss = nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch
                return (loss, outputs) if return_outputs else loss

        options = run_options(per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=4)
        trainer = Divides(
            make_model("bert"),
            library.TrainingArguments(str(tmp_path), **options),
            train_dataset=make_rows("bert"),
            compute_loss_func=MARK,
        )
        trainer.train()
        found.append((losses_of(trainer), [entry["grad_norm"] for entry in trainer.state.log_history[:-1]]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


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
