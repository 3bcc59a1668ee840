"""The quickstart in 16 bits reads as many digits right as in 32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DIGITS = Path(__file__).parents[2] / "examples/digits.py"


@pytest.mark.slow
def test_quickstart_in_16_bits_is_within_a_point_of_32(tmp_path: Path) -> None:
    accuracies = {}
    for precision in ("fp32", "bf16", "fp16"):
        folder = tmp_path / precision
        command = [sys.executable, str(DIGITS), "--output-dir", str(folder), "--precision", precision]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=900)
        accuracies[precision] = json.loads((folder / "test_results.json").read_text("utf-8"))["test_accuracy"]
    assert accuracies["fp32"] > 0.97
    assert all(abs(accuracy - accuracies["fp32"]) <= 0.01 for accuracy in accuracies.values()), accuracies
