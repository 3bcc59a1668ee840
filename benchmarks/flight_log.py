"""What a flight log adds to a step, and how large its lines are; fails above the budget.

    OMP_NUM_THREADS=1 python benchmarks/flight_log.py

One model is trained in turns with and without it, several times. Budget: 2% of a step of 20 ms, that is 0.4 ms, and
1 KB a step. Times are CPU times of the main thread, so run it on one thread, on a quiet machine; the first step of a
run is left out. There is no other log of samples to compare with: `--callback` adds turns with a callback that appends
a line with loss, norm and rate, as many write one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain import Trainer, TrainerCallback, TrainingArguments, set_seed

BUDGET_MS, BUDGET_BYTES = 0.4, 1024


class Stack(nn.Module):
    """Layers of which a step takes about 20 ms on a core."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": nn.functional.cross_entropy(self.head(self.layers(x)), labels)}


class Ends(TrainerCallback):
    """Note the CPU time of this thread when each step ends, which other work on the machine changes little."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the clock."""
        self.at_s.append(time.thread_time())


class Lines(TrainerCallback):
    """Append a line for each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write what was logged."""
        with open(Path(args.output_dir) / "lines.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")


def step_ms(kind: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return the median milliseconds of a step, and the bytes of a line."""
    set_seed(0)
    rows = [{"x": torch.randn(options.width), "labels": torch.tensor(i % 10)} for i in range(2048)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=options.batch, save_strategy="no",
            logging_steps=1 if kind == "lines" else 10_000, report_to="none", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        ends = Ends()
        callbacks = [ends, Lines()] if kind == "lines" else [ends]
        model = Stack(options.width, options.depth)
        Trainer(model, args, train_dataset=rows, callbacks=callbacks, flight_log=kind == "flight log").train()
        path = Path(folder) / "flight" / "rank0.jsonl"
        size = path.stat().st_size / options.steps if path.exists() else 0.0
    times = [1e3 * (after - before) for before, after in zip(ends.at_s[1:], ends.at_s[2:], strict=False)]
    return statistics.median(times), size


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--callback", action="store_true", help="compare with a callback that appends lines")
    options = parser.parse_args()
    kinds = ["none", "flight log", *(["lines"] if options.callback else [])]
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in kinds:
            found[kind].append(step_ms(kind, options))
    plain = [ms for ms, _ in found["none"]]
    print(f"{'':<12}{'ms a step':>10}{'extra ms':>10}{'ratio':>8}{'bytes a step':>14}")
    for kind in kinds:
        ms = [ms for ms, _ in found[kind]]
        extra = statistics.median(one - other for one, other in zip(ms, plain, strict=True))
        ratio, size = statistics.median(ms) / statistics.median(plain), found[kind][0][1]
        print(f"{kind:<12}{statistics.median(ms):>10.2f}{extra:>10.3f}{ratio:>8.3f}{size:>14.0f}")
        if kind == "flight log" and (extra > BUDGET_MS or size > BUDGET_BYTES):
            raise SystemExit(f"Above the budget of {BUDGET_MS} ms and {BUDGET_BYTES} bytes a step.")


if __name__ == "__main__":
    main()
