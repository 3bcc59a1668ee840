"""What `benchmarks/saving.py` counts, with a small model; the promise itself is measured in tests/bench."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from support.source import ROOT

BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "saving.py"))
COMMON = {"other_gaps_s": 0.0, "quiet_s": 0.1, "beside_s": 0.2, "copy_s": 0.5}


@pytest.mark.parametrize(
    "contender", ["hftrain", "hftrain-waiting", pytest.param("transformers", marks=pytest.mark.interop)]
)
def test_benchmark_of_saving_ends_with_all_stalls(tmp_path: Path, contender: str) -> None:
    found = BENCHMARK["train"](contender, width=8, num_saves=2, save_steps=4, folder=str(tmp_path / "out"))
    assert len(found.pop("stalls_s")) == 2
    assert found.keys() == COMMON.keys()
    assert all(seconds > 0 for seconds in found.values())


def test_benchmark_of_saving_tells_how_far_apart_they_are() -> None:
    results = {
        "transformers": [{"stalls_s": [3.0, 8.0, 4.0], **COMMON}, {"stalls_s": [5.0, 5.0, 5.0], **COMMON}],
        "hftrain": [{"stalls_s": [1.0, 0.25, 0.5], **COMMON}, {"stalls_s": [1.0, 0.5, 0.75], **COMMON}],
    }
    first, later = BENCHMARK["verdict"](results).splitlines()
    assert "first save: hftrain stalls 4.0 times less than transformers, short of the target" in first
    assert "2.00 times as long as one copy" in first
    assert "later save: hftrain stalls 10.0 times less than transformers, within the target" in later
    assert (
        BENCHMARK["table"](results).splitlines()[2] == "| transformers | 4000 | 5000 (4000 to 8000) | 500 | 100 | 200 |"
    )
