"""Raw text of `datasets` next to a task, with a tokenizer that pads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

from support.hub_models import make_model, make_rows, make_tokenizer, run_options  # noqa: E402

from hftrain import TaskModule, Trainer, TrainingArguments  # noqa: E402

pytestmark = pytest.mark.interop


class Classify(TaskModule):
    def training_step(self, batch: Any) -> Any:
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        return self.model(**batch).loss


@pytest.mark.parametrize("own", [None, transformers.DataCollatorWithPadding, transformers.DefaultDataCollator])
def test_text_columns_of_datasets_are_left_out_beside_a_task(tmp_path: Path, own: Any) -> None:
    rows = [{**row, "text": "a b", "words": ["a", "b"]} for row in make_rows("bert", 8)]
    data = datasets.Dataset.from_list(rows)
    options: dict[str, Any] = {"processing_class": make_tokenizer()}
    if own is not None:
        options["data_collator"] = own(make_tokenizer()) if own is transformers.DataCollatorWithPadding else own()
    arguments = TrainingArguments(str(tmp_path), **run_options(max_steps=2))
    trainer = Trainer(Classify(make_model("bert")), arguments, train_dataset=data, eval_dataset=data, **options)
    assert trainer.train().global_step == 2
    assert "eval_loss" in trainer.evaluate()
