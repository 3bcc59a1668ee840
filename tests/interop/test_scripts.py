"""Scripts in the style of transformers' examples do with hftrain's Trainer what they do with transformers'.

Each script of tests/interop/scripts runs twice, once with one statement changed: the import of the Trainer. Both runs
are to write the same files, log, metrics, predictions and weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from support.script_runs import assert_same_outcome, run_both  # noqa: E402

pytestmark = pytest.mark.interop


@pytest.fixture(autouse=True)
def environment_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Keep what transformers' Trainer sets for the whole process from outliving a test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    level = transformers.logging.get_verbosity()
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
    transformers.logging.set_verbosity(level)
    transformers.logging.reset_format()


@pytest.mark.parametrize("task", ["classify", "regress", "tag"])
def test_text_classification(tmp_path, monkeypatch, task):
    assert_same_outcome(run_both("text_classification", tmp_path, monkeypatch, task_name=task, do_predict=True))
