"""Speed and memory of a language model against a hand-written loop, measured by `benchmarks/gpt.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.source import ROOT

from hftrain.storage.files import read_json

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

CONTENDERS = ("hftrain-module", "hftrain-task")
MIN_SPEED, MAX_MEMORY = 0.98, 1.02


def measure(path: Path, *options: str) -> dict[str, Any]:
    """Return medians over rounds; the script fails where losses differ."""
    subprocess.run([sys.executable, "benchmarks/gpt.py", *options, "--json", str(path)], cwd=ROOT, check=True)
    return read_json(path)["summary"]


@pytest.mark.cuda
def test_compiled_bf16_gpt_is_as_fast_and_as_small_as_in_a_hand_written_loop(tmp_path: Path) -> None:
    found = measure(tmp_path / "results.json", "--size", "125m", "--precision", "bf16", "--compile")
    for contender in CONTENDERS:
        # Next to them stands "plain-again", the loop's ratio to itself: the noise.
        assert found[contender]["tokens_per_s_ratio"] >= MIN_SPEED, found
        assert found[contender]["peak_bytes_ratio"] <= MAX_MEMORY, found
        assert found[contender]["steady_peak_bytes_ratio"] <= MAX_MEMORY, found


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp16", "tf32"])
def test_gpt_on_a_gpu_does_the_work_of_a_hand_written_loop(tmp_path: Path, precision: str) -> None:
    options = ("--precision", precision, "--no-compile", "--rounds", "1", "--steps", "30")
    found = measure(tmp_path / "results.json", "--size", "125m", *options, "--contenders", *CONTENDERS)
    assert all(found[contender]["tokens_per_s"] > 0 for contender in CONTENDERS)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_tiny_gpt_does_the_work_of_a_hand_written_loop(tmp_path: Path, precision: str) -> None:
    options = ("--precision", precision, "--no-compile", "--rounds", "1", "--steps", "5")
    found = measure(tmp_path / "results.json", "--size", "tiny", *options, "--contenders", *CONTENDERS)
    assert all(found[contender]["tokens_per_s"] > 0 for contender in CONTENDERS)
