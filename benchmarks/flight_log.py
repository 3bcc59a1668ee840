"""What a flight log adds to a step, and how large its lines are, against the budget.

    OMP_NUM_THREADS=1 python benchmarks/flight_log.py

One model is trained in turns with and without it, several times. Budget: 2% of a step of 20 ms, that is 0.4 ms, and
1 KB a step. Times are CPU times of the main thread, so run it on one thread; the first step of a run is left out. The
medians of two runs of one model may differ by more than the budget. So the budget counts the time within the log's own
calls in such a step, where their code and data are as cold as in a real one. There is no other log of samples to
compare with: `--callback` adds turns with a callback that appends a line with loss, norm and rate, as many write one.
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
from hftrain.extras.flight.fingerprint import Fingerprint
from hftrain.extras.flight.invariants import Invariants
from hftrain.extras.flight.ledger import _Recorder

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


class Own:
    """The seconds within calls of the flight log's own methods, without the calls of the loop within those."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for kind, names in (
            (_Recorder, ("end_step", "finish")),
            (Fingerprint, ("of",)),
            (Invariants, ("take_snapshot",)),
        ):
            for name in names:
                setattr(kind, name, self._timed(getattr(kind, name)))

    def _timed(self, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            start_s = time.thread_time()
            try:
                return method(*args, **options)
            finally:
                self.seconds += time.thread_time() - start_s

        return call


class Lines(TrainerCallback):
    """Append a line for each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write what was logged."""
        with open(Path(args.output_dir) / "lines.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")


def step_ms(kind: str, options: argparse.Namespace, own: Own) -> tuple[float, float, float]:
    """Return the median milliseconds of a step, those within the log's own calls, and the bytes of a line."""
    set_seed(0)
    own.seconds = 0.0
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
    return statistics.median(times), 1e3 * own.seconds / options.steps, size


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--callback", action="store_true", help="compare with a callback that appends lines")
    options = parser.parse_args()
    kinds = ["none", "flight log", *(["lines"] if options.callback else [])]
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    own = Own()
    for _ in range(options.rounds):
        for kind in kinds:
            found[kind].append(step_ms(kind, options, own))
    plain = statistics.median(ms for ms, _, _ in found["none"])
    print(f"{'':<12}{'ms a step':>10}{'ratio':>8}{'own ms':>8}{'bytes a step':>14}")
    for kind in kinds:
        ms, own_ms, size = (statistics.median(column) for column in zip(*found[kind], strict=True))
        print(f"{kind:<12}{ms:>10.2f}{ms / plain:>8.3f}{own_ms:>8.3f}{size:>14.0f}")
        if own_ms > BUDGET_MS or size > BUDGET_BYTES:
            print(f"{'':<12}above the budget of {BUDGET_MS} ms and {BUDGET_BYTES} bytes a step")


if __name__ == "__main__":
    main()
