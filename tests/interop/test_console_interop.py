"""What a run says on the console, next to what it says with transformers' Trainer."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from support.hub_models import make_model, make_rows, run_options  # noqa: E402

import hftrain  # noqa: E402
from hftrain.data import columns  # noqa: E402

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("environment_stays")]

# Lines that differ from run to run, or that tell where something is.
_TOLD = re.compile(r"\*{5} Running|Num |Batch size|batch size|Accumulation|Total optimization|Number of trainable")


@pytest.fixture
def heard() -> Iterator[list[logging.LogRecord]]:
    """Collect what transformers' own handlers show, which is what its users see on standard error."""
    records: list[logging.LogRecord] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, ear = logging.getLogger("transformers"), Ear()
    logger.addHandler(ear)
    yield records
    logger.removeHandler(ear)


def run(library: Any, folder: Path) -> None:
    columns._report.cache_clear()
    rows = [{**row, "text": "left out"} for row in make_rows("bert", 8)]
    options = run_options(gradient_accumulation_steps=2, eval_strategy="epoch", save_strategy="epoch")
    trainer = library.Trainer(
        make_model("bert"), library.TrainingArguments(str(folder), **options),
        train_dataset=datasets.Dataset.from_list(rows), eval_dataset=datasets.Dataset.from_list(rows),
        data_collator=transformers.default_data_collator,
    )  # fmt: skip
    trainer.train()
    trainer.predict(datasets.Dataset.from_list(rows))


def told(records: list[logging.LogRecord]) -> list[str]:
    return [line for record in records if _TOLD.search(line := record.getMessage().strip())]


def test_a_script_that_asks_transformers_for_its_messages_gets_those_of_the_run(tmp_path, heard, monkeypatch):
    transformers.logging.set_verbosity_info()
    run(transformers, tmp_path / "theirs")
    theirs = told(heard)
    assert "Total optimization steps = 2" in theirs
    heard.clear()
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])  # pytest's own: an ordinary process has none
        run(hftrain, tmp_path / "ours")
    assert told(heard) == theirs
    texts = [record.getMessage() for record in heard if record.name.startswith("hftrain")]
    assert f"Saving model checkpoint to {tmp_path / 'ours' / 'checkpoint-2'}" in texts
    assert any("text" in text and "argument" in text for text in texts)
    # The level was lent for as long as the run took.
    assert (logging.getLogger("hftrain").level, logging.getLogger("hftrain").handlers) == (logging.NOTSET, [])


def test_a_level_of_its_own_wins(tmp_path, caplog, heard):
    transformers.logging.set_verbosity_info()
    with caplog.at_level(logging.WARNING, logger="hftrain"):
        run(hftrain, tmp_path)
    assert told(heard) == told(caplog.records) == []


def test_messages_appear_once_where_the_script_has_handlers(tmp_path, caplog, heard):
    transformers.logging.set_verbosity_info()
    run(hftrain, tmp_path)
    assert told(heard) == []
    assert told(caplog.records).count("***** Running training *****") == 1


def test_an_ordinary_run_warns_of_nothing(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="hftrain"):
        run(hftrain, tmp_path)
    assert [r.getMessage() for r in caplog.records if r.name.startswith("hftrain") and r.levelno > logging.INFO] == []
