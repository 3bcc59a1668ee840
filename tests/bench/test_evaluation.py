"""What an evaluation costs next to transformers' Trainer, measured by `benchmarks/evaluation.py`."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
from support.source import ROOT

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

SAMPLES, ROUNDS = 200_000, 3


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Return what each contender needed at least, of rounds in turn."""
    pytest.importorskip("transformers")
    names = ("hftrain-streaming", "hftrain-argmax", "transformers-argmax")
    run = runpy.run_path(str(ROOT / "benchmarks/evaluation.py"))["run"]
    rounds = [{name: run(name, SAMPLES) for name in names} for _ in range(ROUNDS)]
    all_kept = run("transformers-logits", SAMPLES)  # takes minutes
    found = {name: [each[name] for each in rounds] for name in names} | {"transformers-logits": [all_kept]}
    assert len({each["accuracy"] for several in found.values() for each in several}) == 1, found
    fields = ("seconds", "peak_bytes")
    return {field: {name: min(each[field] for each in several) for name, several in found.items()} for field in fields}


def test_evaluation_takes_no_longer_than_transformers(results: dict[str, dict[str, Any]]) -> None:
    seconds = results["seconds"]
    assert seconds["hftrain-argmax"] <= seconds["transformers-argmax"], results
    assert seconds["hftrain-streaming"] <= min(seconds["transformers-argmax"], seconds["transformers-logits"]), results


def test_streaming_takes_a_quarter_of_the_memory_of_keeping_all(results: dict[str, dict[str, Any]]) -> None:
    peaks = results["peak_bytes"]
    assert peaks["hftrain-streaming"] < peaks["transformers-logits"] / 4, results
