"""What `import hftrain` costs, next to `import torch`, and what is imported until the first step is done."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "startup.py"
ROUNDS = 5
MAX_RATIO = 1.15
LAZY = ("accelerate", "datasets", "deepspeed", "torchmetrics", "transformers")

# Both in one process, so that whatever slows the machine slows the two alike.
TIMER = """
import json, time
start = time.process_time()
import torch
between = time.process_time()
from hftrain import Trainer, TrainingArguments
print(json.dumps([between - start, time.process_time() - between]))
"""


def run(*command: str) -> str:
    """Run a fresh interpreter, which keeps its bytecode, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=True, env=environment
    ).stdout


def test_import_costs_little_more_than_torch() -> None:
    run("-c", TIMER)  # compiles
    ratios: list[float] = []
    for _ in range(ROUNDS):
        torch_s, more_s = json.loads(run("-c", TIMER))
        ratios.append((torch_s + more_s) / torch_s)
    ratio = statistics.median(ratios)
    assert ratio <= MAX_RATIO, f"importing the Trainer takes {ratio:.2f} times what import torch takes: {ratios}"


@pytest.mark.parametrize("was_enabled", [True, False])
def test_import_leaves_the_garbage_collector_as_it_was(was_enabled: bool) -> None:
    code = """
import gc
passes = []
import torch
gc.callbacks.append(lambda phase, info: passes.append(info["generation"]))
if not {was_enabled}: gc.disable()
from hftrain import Trainer
print(gc.isenabled(), 2 in passes)
"""
    assert run("-c", code.format(was_enabled=was_enabled)).split() == [str(was_enabled), "False"]


def test_first_step_needs_no_more_modules_than_a_plain_scripts_and_our_own() -> None:
    modules = {
        name: set(json.loads(run(str(BENCHMARK), "--modules", name).splitlines()[-1])) for name in ("plain", "hftrain")
    }
    ours = {name.partition(".")[0] for name in modules["hftrain"] - modules["plain"]}
    assert ours - {"hftrain", "safetensors"} <= sys.stdlib_module_names
    assert not [name for name in modules["hftrain"] - modules["plain"] if name.startswith("torch.")]


def test_import_leaves_heavy_packages_alone() -> None:
    code = f"import json, sys, hftrain; print(json.dumps([name for name in {LAZY!r} if name in sys.modules]))"
    assert json.loads(run("-c", code)) == []
