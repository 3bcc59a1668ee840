"""The progress of a notebook: transformers' table, where transformers is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny import make_rows, make_trainer

pytest.importorskip("transformers")

import hftrain
from hftrain.callbacks import progress_callback
from hftrain.extras.progress.bars import in_notebook, is_notebook_table

pytestmark = pytest.mark.interop


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for a notebook's kernel; return the blocks of HTML that it shows."""
    blocks: list[str] = []
    output = SimpleNamespace(update=blocks.append)
    display = SimpleNamespace(HTML=str, display=lambda block, display_id=None: blocks.append(block) or output)
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()), display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", display)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "transformers.utils.notebook", raising=False)
    return blocks


def test_notebook_shows_the_table_of_transformers(tmp_path: Path, shown: list[str]) -> None:
    parts: dict[str, Any] = {"train_dataset": make_rows(8), "eval_dataset": make_rows(8)}
    trainer = make_trainer(tmp_path, num_train_epochs=2, eval_strategy="epoch", disable_tqdm=False, **parts)
    callback = trainer.callback_handler.callbacks[-1]
    assert is_notebook_table(callback)
    assert type(callback) is sys.modules["transformers.utils.notebook"].NotebookProgressCallback
    trainer.train()
    assert shown[-1].count("<tr>") == 2
    assert "Validation Loss" in shown[-1]
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert all(f"{loss:.6f}" in shown[-1] for loss in losses)


def test_notebook_without_transformers_has_bars(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hftrain.extras.progress.bars.is_available", lambda requirement: False)
    assert in_notebook()
    assert progress_callback(disable_tqdm=False) is hftrain.ProgressCallback
    assert progress_callback(disable_tqdm=True) is hftrain.PrinterCallback


def test_in_notebook_is_false_here() -> None:
    assert in_notebook() is False
