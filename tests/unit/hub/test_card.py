from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hftrain.core.extras import is_available
from hftrain.extras.hub.card import CardFacts, write_card
from hftrain.extras.hub.uploads import REQUIREMENT

pytestmark = pytest.mark.skipif(not is_available(REQUIREMENT), reason=f"{REQUIREMENT} is not installed")

HISTORY: list[dict[str, Any]] = [
    {"loss": 0.75, "epoch": 0.5, "step": 2},
    {"eval_loss": 0.5, "eval_f1": 0.25, "eval_runtime": 1.0, "eval_samples_per_second": 9.0, "epoch": 1.0, "step": 4},
    {"eval_loss": 0.4, "eval_f1": 0.5, "epoch": 2.0, "step": 8},
    {"train_loss": 0.6, "train_runtime": 2.0, "epoch": 2.0, "step": 8},
]


def write(folder: Path, **facts: Any) -> Any:
    """Write a card and read it again."""
    from huggingface_hub import ModelCard

    write_card(folder / "README.md", CardFacts(**{"model_name": "mine", "library_name": "hftrain", **facts}))
    return ModelCard.load(folder / "README.md")


def test_write_card_gives_metadata(tmp_path: Path) -> None:
    card = write(
        tmp_path, language="en", license="mit", tags=["a"], finetuned_from="org/base", dataset_tags=["glue", "imdb"]
    )
    data = card.data
    assert (data.language, data.license, data.base_model, data.datasets) == ("en", "mit", "org/base", ["glue", "imdb"])
    assert data.tags == ["a", "generated_from_trainer", "hftrain"]
    assert data.library_name == "hftrain"
    assert "fine-tuned from `org/base` on glue and imdb" in card.text


def test_write_card_gives_results_in_the_hubs_form(tmp_path: Path) -> None:
    facts = {"tasks": ["text-classification"], "dataset_tags": ["glue"], "datasets": ["GLUE"], "dataset_args": ["mrpc"]}
    card = write(tmp_path, **facts, log_history=HISTORY)
    (result,) = card.data.eval_results
    assert (result.task_type, result.dataset_type, result.dataset_name) == ("text-classification", "glue", "GLUE")
    assert (result.metric_type, result.metric_name, result.metric_value) == ("f1", "F1", 0.5)
    assert result.dataset_args == "mrpc"
    assert card.data.pipeline_tag == "text-classification"
    assert "GLUE (mrpc)" in card.text


def test_write_card_tells_how_it_was_trained(tmp_path: Path) -> None:
    text = write(tmp_path, hyperparameters={"learning_rate": 5e-05, "seed": 42}, log_history=HISTORY).text
    for line in (
        "- learning_rate: 5e-05",
        "- seed: 42",
        "- f1: 0.5",
        "| training loss | epoch | step | loss | f1 |",
        "| 0.75 | 1 | 4 | 0.5 | 0.25 |",
        "| 0.75 | 2 | 8 | 0.4 | 0.5 |",
    ):
        assert line in text.splitlines()
    for package in ("hftrain", "torch", "accelerate"):
        assert f"- {package} " in text


def test_write_card_shows_several_evaluation_sets_in_one_row(tmp_path: Path) -> None:
    history = [{"eval_a_loss": 1.0, "epoch": 1.0, "step": 4}, {"eval_b_loss": 2.0, "epoch": 1.0, "step": 4}]
    assert "| no log | 1 | 4 | 1 | 2 |" in write(tmp_path, log_history=history).text


@pytest.mark.parametrize(
    "tags",
    [
        "[mine]",
        pytest.param(
            "mine", marks=pytest.mark.skipif(not is_available("huggingface_hub>=1"), reason="it makes letters of it")
        ),
    ],
)
def test_write_card_keeps_what_others_wrote(tmp_path: Path, tags: str) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"---\nlicense: mit\ntags: {tags}\nextra: 1\n---\n\nMy own words.\n", encoding="utf-8")
    write(tmp_path, tags=["b"], hyperparameters={"seed": 1})
    path.write_text(path.read_text("utf-8") + "\nMore words.\n", encoding="utf-8")
    card = write(tmp_path, tags=["c"], hyperparameters={"seed": 2})
    assert card.data.tags == ["mine", "b", "generated_from_trainer", "hftrain", "c"]
    assert (card.data.license, card.data.extra) == ("mit", 1)
    assert card.text.count("My own words.") == card.text.count("More words.") == 1
    assert "- seed: 2" in card.text
    assert "- seed: 1" not in card.text


def test_write_card_keeps_the_library_of_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlibrary_name: peft\nbase_model: org/base\n---\n", encoding="utf-8")
    card = write(tmp_path, library_name="transformers")
    assert (card.data.library_name, card.data.base_model) == ("peft", "org/base")
