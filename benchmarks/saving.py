"""Measure how long a checkpoint holds training up, against the synchronous save of transformers' Trainer.

    python benchmarks/saving.py                                # the table, some minutes; writes 1.2 GB per checkpoint
    python benchmarks/saving.py --rounds 1 --contenders transformers hftrain              # the ratio alone, once
    python benchmarks/saving.py --width 512 --folder /data     # a small model, on the disk that matters

A multilayer perceptron of 100 million parameters trains in float32 with AdamW, on one CPU core for the steps and
another for whatever a contender does beside them. Everybody saves all that a resume needs, 1.2 GB, at the same steps:

- hftrain: `save_policy=SavePolicy(save_async=True)`.
- hftrain-waiting: the default; each file is flushed and hashed before training goes on.
- transformers: its Trainer, which only writes. No flush, no proof: the bytes may still be in memory when it goes on.

Each runs in a process of its own, in rounds of all, so that a busy neighbour meets all. The stall is the time that the
loop stands still: from the end of the step that saves to the begin of the next, less what that takes where nothing is
saved. The first save of a process is told apart. Before each save the thread of the one before is waited for, outside
of what is measured, so that a few steps between two saves are enough. What that thread takes from the steps beside it
is no stall; a column shows it. "One copy" is what copying the same tensors to memory that is in use already takes, in
the same process after the training.
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
import threading
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

CONTENDERS = ("transformers", "hftrain", "hftrain-waiting")
NUM_LAYERS = 6
TARGET = 5.0
NUM_COPIES = 3


class Net(nn.Module):
    """A multilayer perceptron that returns its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_LAYERS)))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(inputs), labels)}


class EnoughError(Exception):
    """All is measured; the end of a run would save once more."""


class Clock:
    """Note when each step begins and ends; a callback of either Trainer, which are alike.

    Args:
        save_steps: How many steps there are from one save to the next.
        num_steps: When to stop.
    """

    def __init__(self, *, save_steps: int, num_steps: int) -> None:
        self.save_steps, self.num_steps = save_steps, num_steps
        self.begins_s: list[float] = []
        self.ends_s: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begins_s.append(time.perf_counter())
        if state.global_step == self.num_steps:
            raise EnoughError
        if state.global_step % self.save_steps == self.save_steps - 1:
            for thread in threading.enumerate():
                if thread.name == "hftrain-save":
                    thread.join()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends_s.append(time.perf_counter())


def train(contender: str, *, width: int, num_saves: int, save_steps: int, folder: str) -> dict[str, Any]:
    """Train once, and return the seconds of every stall and of the steps."""
    options: dict[str, Any] = {}
    if contender == "transformers":
        from transformers import Trainer, TrainerCallback, TrainingArguments
    else:
        from hftrain import SavePolicy, Trainer, TrainerCallback, TrainingArguments  # type: ignore[assignment]

        options["save_policy"] = SavePolicy(save_async=contender == "hftrain")
    torch.manual_seed(0)
    sample = torch.randn(2, width)
    net = Net(width)
    num_steps = (num_saves + 1) * save_steps - 1
    arguments = TrainingArguments(
        folder, max_steps=num_steps + 1, save_strategy="steps", save_steps=save_steps, save_total_limit=1,
        per_device_train_batch_size=2, optim="adamw_torch_fused", use_cpu=True, report_to="none",
        logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    clock = type("ClockCallback", (Clock, TrainerCallback), {})(save_steps=save_steps, num_steps=num_steps)
    trainer = Trainer(
        net, arguments, train_dataset=[{"inputs": x, "labels": x} for x in sample] * num_steps, callbacks=[clock],
        **options,
    )  # fmt: skip
    with contextlib.suppress(EnoughError):
        trainer.train()
    assert len(list(Path(folder).glob("checkpoint-*"))) == 1
    gaps_s = [begin - end for end, begin in zip(clock.ends_s, clock.begins_s[1:], strict=True)]
    steps_s = [end - begin for begin, end in zip(clock.begins_s, clock.ends_s, strict=False)]
    saved = range(save_steps - 1, num_saves * save_steps, save_steps)
    usual_s = statistics.median(gap for index, gap in enumerate(gaps_s) if index not in saved)
    is_beside = [index for index in range(save_steps, len(steps_s)) if index not in saved]
    return {
        "stalls_s": [gaps_s[index] - usual_s for index in saved],
        "other_gaps_s": max(gap for index, gap in enumerate(gaps_s) if index not in saved),
        # The first step makes the optimizer's state, and a step at whose begin a thread is waited for is no measure.
        "quiet_s": statistics.median(steps_s[1 : save_steps - 1]),
        "beside_s": statistics.median(steps_s[index] for index in is_beside),
        "copy_s": copy_s([*net.parameters(), *tensors_of(trainer.optimizer)]),
    }


def tensors_of(optimizer: Any) -> list[torch.Tensor]:
    """Return an optimizer's state; transformers hides the optimizer in accelerate's."""
    return [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]


def copy_s(tensors: list[torch.Tensor]) -> float:
    """Return what copying tensors to memory that has been written to takes, at best."""
    rooms = [tensor.detach().clone() for tensor in tensors]
    took_s = []
    for _ in range(NUM_COPIES):
        start_s = time.perf_counter()
        for room, tensor in zip(rooms, tensors, strict=True):
            room.copy_(tensor.detach())
        took_s.append(time.perf_counter() - start_s)
    return statistics.median(took_s)


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
    """Return the results as a Markdown table, medians over rounds and saves."""
    lines = [
        "| contender | ms of stall, first save | later saves (least to most) | one copy | ms per step before any save "
        "| between saves |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for contender, runs in results.items():
        later = [1e3 * stall for run in runs for stall in run["stalls_s"][1:]]
        stalls = f"{1e3 * first_s(runs):.0f} | {1e3 * later_s(runs):.0f} ({min(later):.0f} to {max(later):.0f})"
        others = " | ".join(f"{1e3 * median(runs, name):.0f}" for name in ("copy_s", "quiet_s", "beside_s"))
        lines.append(f"| {contender} | {stalls} | {others} |")
    return "\n".join(lines)


def median(runs: list[dict[str, Any]], name: str) -> float:
    """Return the median over runs."""
    return statistics.median(run[name] for run in runs)


def first_s(runs: list[dict[str, Any]]) -> float:
    """Return the median stall of each run's first save."""
    return statistics.median(run["stalls_s"][0] for run in runs)


def later_s(runs: list[dict[str, Any]]) -> float:
    """Return the median stall of all saves but the first of each run."""
    return statistics.median(stall for run in runs for stall in run["stalls_s"][1:])


def verdict(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return how much less than transformers hftrain stalls, in words."""
    theirs, ours = results["transformers"], results["hftrain"]
    lines = []
    for which, stall_s in (("first", first_s), ("later", later_s)):
        ratio = stall_s(theirs) / stall_s(ours)
        verdict = "within" if ratio >= TARGET else "short of"
        copies = stall_s(ours) / median(ours, "copy_s")
        lines.append(
            f"{which} save: hftrain stalls {ratio:.1f} times less than transformers, {verdict} the target of "
            f"{TARGET:g}, and {copies:.2f} times as long as one copy takes."
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=4096, help="of the layers; 4096 makes 100 million parameters")
    parser.add_argument("--saves", type=int, default=3, help="in each run; at least 2")
    parser.add_argument("--steps", type=int, default=6, help="between two saves; at least 4")
    parser.add_argument("--rounds", type=int, default=2, help="how often all take their turn")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
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
    names = [name for name in options.contenders if find_spec(name.partition("-")[0]) is not None]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            found = in_process(
                name, width=options.width, num_saves=options.saves, save_steps=options.steps, folder=options.folder
            )
            results[name].append(found)
            stalls = ", ".join(f"{1e3 * stall:.0f}" for stall in found["stalls_s"])
            print(f"round {number + 1}, {name}: {stalls} ms", file=sys.stderr, flush=True)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {NUM_LAYERS * options.width**2:,} weights\n")
    print(table(results))
    if {"transformers", "hftrain"} <= results.keys():
        print(f"\n{verdict(results)}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
