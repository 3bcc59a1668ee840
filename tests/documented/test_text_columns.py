"""Columns of raw text next to a task, whose own columns nobody knows: no tensor can be made of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Task, make_arguments, make_rows, train

from hftrain import DataCollatorWithPadding, DefaultDataCollator, TaskError, Trainer
from hftrain.data import columns

SQUAD = {"text": ["a"], "answer_start": [0]}


class Pads:
    """Stand in for a tokenizer: pads nothing, and makes tensors of all there is."""

    pad_token_id = 0

    def pad(self, features: list[Any], **options: Any) -> dict[str, Any]:
        return {name: torch.as_tensor([row[name] for row in features]) for name in features[0]}


def with_text(num: int = 8) -> list[dict[str, Any]]:
    return [
        {"x": row["x"].tolist(), "labels": int(row["labels"]), "text": "a", "tokens": ["a", "b"], "answers": SQUAD}
        for row in make_rows(num)
    ]


class Seen(Task):
    """Note the columns of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.columns: set[str] = set()

    def training_step(self, batch: Any) -> Any:
        self.columns |= set(batch)
        return super().training_step(batch)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data_collator": DefaultDataCollator()},
        {"processing_class": Pads()},
        {"data_collator": DataCollatorWithPadding(Pads())},
    ],
)
def test_text_next_to_a_task_is_left_out_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    columns._report.cache_clear()  # as in a process that starts now
    task = Seen()
    with caplog.at_level(logging.INFO):
        trainer = Trainer(
            task, make_arguments(tmp_path, max_steps=3), train_dataset=with_text(), eval_dataset=with_text(), **options
        )
        trainer.train()
    assert "eval_loss" in trainer.evaluate()
    assert task.columns == {"x", "labels"}
    lines = [record for record in caplog.records if "cannot become tensors" in record.message]
    assert [(record.levelname, "text, tokens, answers" in record.message) for record in lines] == [("INFO", True)]


def test_own_collator_gets_the_text(tmp_path: Path) -> None:
    texts: list[str] = []

    def collate(features: list[Any]) -> Any:
        texts.extend(row.pop("text") for row in features)
        return {name: torch.tensor([row[name] for row in features]) for name in ("x", "labels")}

    train(tmp_path, Seen(), train_dataset=with_text(), data_collator=collate, max_steps=1)
    assert texts == ["a"] * 8  # one batch is read ahead


def test_text_that_is_to_be_kept_is_named(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, max_steps=1, remove_unused_columns=False)
    trainer = Trainer(Seen(), arguments, train_dataset=with_text(), processing_class=Pads())
    with pytest.raises(TaskError, match=r"[Tt]okenize"):
        trainer.train()
