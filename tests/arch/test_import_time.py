"""What `import hftrain` costs, next to `import torch`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

ROUNDS = 5
MAX_RATIO = 1.2
LAZY = ("accelerate", "datasets", "deepspeed", "torchmetrics", "transformers")

# Processor time: unlike the clock, it does not depend on what else the machine is doing.
TIMER = "import time; start = time.process_time(); import {}; print(time.process_time() - start)"


def run(code: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_costs_little_more_than_torch() -> None:
    seconds: dict[str, list[float]] = {"torch": [], "hftrain": []}
    for _ in range(ROUNDS):
        for package, found in seconds.items():
            found.append(float(run(TIMER.format(package))))
    ratio = statistics.median(seconds["hftrain"]) / statistics.median(seconds["torch"])
    assert ratio <= MAX_RATIO, f"import hftrain takes {ratio:.2f} times what import torch takes: {seconds}"


def test_import_leaves_heavy_packages_alone() -> None:
    code = f"import json, sys, hftrain; print(json.dumps([name for name in {LAZY!r} if name in sys.modules]))"
    assert json.loads(run(code)) == []
