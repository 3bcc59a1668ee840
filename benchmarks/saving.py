"""Measure how long a checkpoint holds training up, against the synchronous save of transformers' Trainer.

    python benchmarks/saving.py                              # the table, some minutes; writes 1.2 GB per checkpoint
    python benchmarks/saving.py --width 512 --folder /data   # a small model, on the disk that matters

A multilayer perceptron of 100 million parameters trains in float32 with AdamW, on one CPU core for the steps and
another for whatever a contender does beside them. Everybody saves all that a resume needs, 1.2 GB, at the same steps:

- hftrain: `save_policy=SavePolicy(save_async=True)`.
- hftrain-waiting: the default; each file is flushed and hashed before training goes on.
- transformers: its Trainer, which only writes. No flush, no proof: the bytes may still be in memory when it goes on.

Each runs in a process of its own, in turns, so that a busy neighbour meets all. The stall is the time from entering
`Trainer._save_checkpoint` to leaving it; the first one is told apart, because memory for the copy is taken there. What
the thread in the background takes from the steps beside it is not part of the stall: the last columns show it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

CONTENDERS = ("transformers", "hftrain", "hftrain-waiting")
NUM_LAYERS = 6
TARGET = 5.0


class Net(nn.Module):
    """A multilayer perceptron that notes when it is entered."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_LAYERS)))
        self.entered_s: list[float] = []

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.entered_s.append(time.perf_counter())
        return {"loss": nn.functional.mse_loss(self.layers(inputs), labels)}


def train(contender: str, *, width: int, num_saves: int, save_steps: int, folder: str) -> dict[str, Any]:
    """Train once, and return the seconds of every stall and of every step."""
    options: dict[str, Any] = {}
    if contender == "transformers":
        from transformers import Trainer, TrainingArguments
    else:
        from hftrain import SavePolicy, Trainer, TrainingArguments  # type: ignore[assignment]

        options["save_policy"] = SavePolicy(save_async=contender == "hftrain")
    stalls_s: list[tuple[float, float]] = []
    save = Trainer._save_checkpoint

    def timed(self: Any, *args: Any, **named: Any) -> None:
        start_s = time.perf_counter()
        save(self, *args, **named)
        stalls_s.append((start_s, time.perf_counter()))

    # Not in a subclass, whose saves would be taken for its own and be waited for.
    Trainer._save_checkpoint = timed  # type: ignore[method-assign, assignment]
    torch.manual_seed(0)
    sample = torch.randn(2, width)
    net = Net(width)
    arguments = TrainingArguments(
        folder, max_steps=num_saves * save_steps + save_steps - 1, save_strategy="steps", save_steps=save_steps,
        save_total_limit=1, per_device_train_batch_size=2, optim="adamw_torch", use_cpu=True, report_to="none",
        logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(net, arguments, train_dataset=[{"inputs": x, "labels": x} for x in sample] * 64, **options)
    trainer.train()
    stalls_s = stalls_s[:num_saves]  # not that of the run's end
    entered_s = net.entered_s
    ends_s = [entered_s[index * save_steps - 1] for index in range(2, num_saves + 1)]
    begins_s = [entered_s[index * save_steps - 1] for index in range(1, num_saves)]
    steps_s = [later - earlier for earlier, later in pairwise(entered_s)]
    stalled = {index * save_steps - 1 for index in range(1, num_saves + 1)}
    # Before the first save nothing is written.
    quiet_s = statistics.median(steps_s[2 : save_steps - 1])
    return {
        "stalls_s": [end - begin for begin, end in stalls_s],
        "quiet_s": quiet_s,
        "beside_s": max(step for index, step in enumerate(steps_s) if index > save_steps and index not in stalled),
        "lost_s": [end - begin - save_steps * quiet_s for begin, end in zip(begins_s, ends_s, strict=True)],
    }


def in_process(contender: str, **options: Any) -> dict[str, Any]:
    """Call `train` in a new process, with a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(dir=options.pop("folder")) as folder:
        request = json.dumps({"contender": contender, "folder": f"{folder}/out", **options})
        done = subprocess.run(
            [sys.executable, __file__, "--request", request], check=True, stdout=subprocess.PIPE, text=True
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return the results as a Markdown table; the median over repeats and saves."""
    lines = [
        "| contender | ms of stall per save | the first | ms per step before any | slowest step beside one "
        "| ms lost per save in all |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for contender, runs in results.items():
        first = statistics.median(run["stalls_s"][0] for run in runs)
        quiet = statistics.median(run["quiet_s"] for run in runs)
        beside = statistics.median(run["beside_s"] for run in runs)
        lost = statistics.median(lost for run in runs for lost in run["lost_s"])
        lines.append(
            f"| {contender} | {1e3 * stall_s(runs):.0f} | {1e3 * first:.0f} | {1e3 * quiet:.0f} | {1e3 * beside:.0f} "
            f"| {1e3 * lost:.0f} |"
        )
    return "\n".join(lines)


def stall_s(runs: list[dict[str, Any]]) -> float:
    """Return the median stall of all saves but the first of each run."""
    return statistics.median(stall for run in runs for stall in run["stalls_s"][1:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=4096, help="of the layers; 4096 makes 100 million parameters")
    parser.add_argument("--saves", type=int, default=4, help="in each run")
    parser.add_argument("--steps", type=int, default=30, help="between two saves; writing one must not take longer")
    parser.add_argument("--repeats", type=int, default=2, help="how often all take their turn")
    parser.add_argument("--folder", help="where to save; by default where temporary files go")
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    parser.add_argument("--request", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.request:
        torch.set_num_threads(1)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            found = train(**json.loads(options.request))
        print(json.dumps(found))
        return
    names = [name for name in CONTENDERS if find_spec(name.partition("-")[0]) is not None]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(options.repeats):
        for name in names if number % 2 == 0 else reversed(names):
            found = in_process(
                name, width=options.width, num_saves=options.saves, save_steps=options.steps, folder=options.folder
            )
            results[name].append(found)
            print(f"{name}: done", file=sys.stderr)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {NUM_LAYERS * options.width**2:,} weights\n")
    print(table(results))
    if "transformers" in results:
        ratio = stall_s(results["transformers"]) / stall_s(results["hftrain"])
        verdict = "within" if ratio >= TARGET else "short of"
        print(f"\nhftrain stalls {ratio:.1f} times less than transformers, {verdict} the target of {TARGET:g}.")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
