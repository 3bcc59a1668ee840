"""What `import hftrain` costs, next to `import torch`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

ROUNDS = 5
MAX_RATIO = 1.2
LAZY = ("accelerate", "datasets", "deepspeed", "torchmetrics", "transformers")

# Both in one process, so that whatever slows the machine slows the two alike.
TIMER = """
import json, time
start = time.process_time()
import torch
between = time.process_time()
import hftrain
print(json.dumps([between - start, time.process_time() - between]))
"""


def run(code: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_costs_little_more_than_torch() -> None:
    ratios: list[float] = []
    for _ in range(ROUNDS):
        torch_s, more_s = json.loads(run(TIMER))
        ratios.append((torch_s + more_s) / torch_s)
    ratio = statistics.median(ratios)
    assert ratio <= MAX_RATIO, f"import hftrain takes {ratio:.2f} times what import torch takes: {ratios}"


def test_import_leaves_heavy_packages_alone() -> None:
    code = f"import json, sys, hftrain; print(json.dumps([name for name in {LAZY!r} if name in sys.modules]))"
    assert json.loads(run(code)) == []
