"""What an evaluation holds in memory, as the system sees it: measured by `benchmarks/evaluation.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.source import ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of memory")

SLACK_BYTES = 20_000_000


def measure(contender: str, num_samples: int) -> dict[str, Any]:
    command = [sys.executable, "benchmarks/evaluation.py", "--child", contender, "--samples", str(num_samples)]
    shown = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(shown.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_streaming_metrics_take_no_memory_per_sample_of_a_large_set() -> None:
    # The process has evaluated 2,000 samples already: what it takes beyond that is what the larger set adds.
    assert measure("hftrain-streaming", 200_000)["peak_bytes"] < SLACK_BYTES


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("contender", ["hftrain-argmax", "hftrain-tokens", "hftrain-logits"])
def test_what_is_kept_of_a_large_set_is_held_once(contender: str) -> None:
    found = measure(contender, 200_000)
    assert found["peak_bytes"] <= 1.3 * found["kept_bytes"] + 2_000_000
