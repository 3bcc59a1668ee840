"""Scripts in the style of transformers' examples do with hftrain's Trainer what they do with transformers'.

Each script of tests/interop/scripts runs twice, once with its imports from transformers changed to hftrain. Both runs
are to write the same files, log, metrics, predictions and weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from support.script_runs import assert_same_outcome, files_of, history_of, run_both, run_script  # noqa: E402

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("environment_stays")]


# The rule where labels are ragged: hftrain's is the mean over all items, transformers' that of the batches' means.
MEANS_OVER_ITEMS = ("eval_loss", "predict_loss", "perplexity")


def compare(folder: Path, patch: pytest.MonkeyPatch, name: str, *, ignore: Any = (), **flags: Any) -> None:
    """Run a script twice and compare all that it leaves behind."""
    assert_same_outcome(run_both(name, folder, patch, **flags), ignore=ignore)


# -- texts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["classify", "regress", "tag"])
def test_text_classification(tmp_path, monkeypatch, task):
    flags = {"task_name": task, "do_predict": True, "mismatched": True, "max_train_samples": 20}
    compare(tmp_path, monkeypatch, "text_classification", **flags)


def test_question_answering(tmp_path, monkeypatch):
    compare(tmp_path, monkeypatch, "question_answering", do_predict=True, learning_rate=1e-4)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("flags", [{}, {"use_lora": True}, {"streaming": True, "max_steps": 8}])
def test_causal_language_modelling(tmp_path, monkeypatch, flags):
    compare(tmp_path, monkeypatch, "causal_lm", **flags)


@pytest.mark.parametrize("objective", ["mask", "permute"])
def test_masked_language_modelling(tmp_path, monkeypatch, objective):
    compare(tmp_path, monkeypatch, "masked_lm", objective=objective, ignore=MEANS_OVER_ITEMS)


def test_random_masks_are_those_of_transformers_until_an_evaluation(tmp_path, monkeypatch):
    # The rule: an evaluation draws nothing that the training's numbers depend on.
    folders = run_both("masked_lm", tmp_path, monkeypatch, fixed_masks=False)
    assert files_of(folders[0]) == files_of(folders[1])
    ours, theirs = (history_of(folder) for folder in folders)
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    is_evaluated = [line["epoch"] > 1 for line in ours if "loss" in line]
    losses = [[line["loss"] for line in history if "loss" in line] for history in (ours, theirs)]
    is_same = [some == pytest.approx(other, rel=1e-5) for some, other in zip(*losses, strict=True)]
    assert is_same == [not evaluated for evaluated in is_evaluated]


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_image_classification(tmp_path, monkeypatch):
    compare(tmp_path, monkeypatch, "image_classification")


# -- several batches a step, and runs that go on -----------------------------------------------------------------------


def test_accumulation_of_a_model_that_takes_the_item_count(tmp_path, monkeypatch):
    compare(tmp_path, monkeypatch, "causal_lm", gradient_accumulation_steps=2, warmup_steps=1)


def test_a_script_goes_on_from_the_last_checkpoint(tmp_path, monkeypatch):
    whole = run_script("causal_lm", "hftrain", tmp_path / "whole", monkeypatch)
    parts = run_script("causal_lm", "hftrain", tmp_path / "parts", monkeypatch)
    last = sorted(parts.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[-1]
    shutil.rmtree(last)  # as if the run had been killed in its second epoch
    run_script("causal_lm", "hftrain", parts, monkeypatch)
    assert_same_outcome((parts, whole))
