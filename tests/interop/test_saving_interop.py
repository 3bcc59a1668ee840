"""What is saved, and what metrics batch by batch are given, next to transformers' own Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from support.hub_models import VOCABULARY, make_model, make_rows, make_tokenizer, run_options  # noqa: E402

import hftrain  # noqa: E402

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("environment_stays")]
LIBRARIES = (hftrain, transformers)


TOKENS: dict[str, tuple[dict[str, str | None], dict[str, Any]]] = {
    "pad only": ({}, {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}),
    "all new": ({"pad_token": "b", "bos_token": "c", "eos_token": "d"}, {"bos_token_id": 9, "eos_token_id": 8}),
    "several ends": ({"eos_token": "d"}, {"eos_token_id": [8, 9]}),
    "the same": ({"eos_token": "d"}, {"eos_token_id": VOCABULARY.index("d")}),
    "none": ({"pad_token": None}, {"eos_token_id": 8}),
}


@pytest.mark.parametrize("name", TOKENS)
def test_special_tokens_of_model_and_files_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    tokens, config = TOKENS[name]
    found = []
    for library in LIBRARIES:
        folder = tmp_path / library.__name__
        model = make_model("llama")
        for key, value in config.items():
            setattr(model.config, key, value)
            setattr(model.generation_config, key, value)
        args = library.TrainingArguments(str(folder), **{**run_options(), "save_strategy": "steps", "max_steps": 1})
        trainer = library.Trainer(
            model, args, train_dataset=make_rows("llama"), processing_class=make_tokenizer(**tokens),
            data_collator=transformers.default_data_collator,
        )  # fmt: skip
        trainer.train()
        trainer.save_model(str(folder / "end"))
        files = [json.loads((folder / "end" / f"{kind}.json").read_text()) for kind in ("config", "generation_config")]
        ids = ("pad_token_id", "bos_token_id", "eos_token_id")
        found.append(
            [{key: getattr(each, key) for key in ids} for each in (model.config, model.generation_config)]
            + [{key: each.get(key) for key in ids} for each in files]
        )
    assert found[0] == found[1]
