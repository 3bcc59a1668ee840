"""What is saved, and what metrics batch by batch are given, next to transformers' own Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.hub_models import VOCABULARY, make_model, make_rows, make_tokenizer, run_options  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

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


def test_metrics_batch_by_batch_get_what_transformers_gives(tmp_path: Path) -> None:
    found: dict[str, list[Any]] = {library.__name__: [] for library in LIBRARIES}
    for library in LIBRARIES:

        def note(prediction: Any, compute_result: bool, name: str = library.__name__) -> dict[str, Any]:
            logits, labels = prediction.predictions, prediction.label_ids
            assert all(type(value) is torch.Tensor for value in (logits, labels, prediction.losses))
            found[name].append((logits, labels, prediction.losses, compute_result))
            return {"right": (logits.argmax(-1) == labels).float().mean()} if compute_result else {}

        args = library.TrainingArguments(
            str(tmp_path), **run_options(), batch_eval_metrics=True, include_for_metrics=["loss"]
        )
        trainer = library.Trainer(
            make_model("bert"), args, eval_dataset=make_rows("bert", 8), compute_metrics=note,
            data_collator=transformers.default_data_collator,
        )  # fmt: skip
        found[library.__name__].append(trainer.evaluate()["eval_right"])
    ours, theirs = found.values()
    assert ours.pop() == theirs.pop()
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[3] == other[3]
        for ours_part, theirs_part in zip(mine[:3], other[:3], strict=True):
            assert ours_part.dtype == theirs_part.dtype
            assert torch.equal(ours_part, theirs_part)


@pytest.mark.parametrize("workers", [0, 2])
def test_prepared_loader_trains_as_in_transformers(tmp_path: Path, workers: int) -> None:
    histories = []
    for library in LIBRARIES:

        class Own(library.Trainer):  # type: ignore[name-defined, misc]
            def get_train_dataloader(self) -> Any:
                loader = DataLoader(
                    self.train_dataset, batch_size=4, shuffle=True, num_workers=workers, collate_fn=self.data_collator
                )
                return self.accelerator.prepare(loader)

        args = library.TrainingArguments(
            str(tmp_path / library.__name__),
            **{**run_options(), "num_train_epochs": 3, "save_strategy": "epoch", "data_seed": 5},
        )
        trainer = Own(
            make_model("bert"), args, train_dataset=make_rows("bert"), data_collator=transformers.default_data_collator
        )
        trainer.train()
        histories.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert histories[0] == pytest.approx(histories[1], rel=1e-5)
