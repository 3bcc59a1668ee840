"""What a save costs as a run grows: with the checkpoints in its folder, and with the entries of its log.

    python benchmarks/growth.py

Each figure is the median CPU time of a save of a tiny model (the disk's own time is left out), of the main thread
alone where saves are asynchronous, which is what training waits for.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain import SavePolicy, Trainer, TrainerCallback, TrainingArguments
from hftrain.checkpoint.manifest import read_manifest, write_manifest
from hftrain.core.log import get_logger

NUM_SAVES = 7
DATA = [{"x": torch.ones(4) * i, "labels": torch.tensor(i % 2)} for i in range(16)]


class Net(nn.Module):
    """A tiny classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}


class Timed(Trainer):
    """Note the time of each save."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.saves_s: list[tuple[float, float]] = []

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        own_s, all_s = time.thread_time(), time.process_time()
        super()._save_checkpoint(*args, **kwargs)
        self.saves_s.append((time.thread_time() - own_s, time.process_time() - all_s))


class Grown(TrainerCallback):
    """Begin with a long log, and with many checkpoints of the run in its folder."""

    def __init__(self, num_entries: int, num_checkpoints: int) -> None:
        self.num_entries, self.num_checkpoints = num_entries, num_checkpoints

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make up the log."""
        state.log_history = [
            {"loss": 2.5 / (i + 1), "grad_norm": 1.0 + i, "learning_rate": 1e-5 * i, "epoch": i / 7, "step": i}
            for i in range(self.num_entries)
        ]

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the first save, make up the checkpoints, all of this run."""
        whole = Path(args.output_dir) / "checkpoint-1"
        if state.global_step > 1 or not whole.is_dir():
            return
        manifest = read_manifest(whole)
        for step in range(1000, 1000 + self.num_checkpoints - 1):
            folder = Path(args.output_dir) / f"checkpoint-{step}"
            shutil.copytree(whole, folder)
            (folder / "manifest.json").unlink()
            write_manifest(folder, manifest.facts, step=step)


def measure(*, num_entries: int, num_checkpoints: int, save_async: bool) -> tuple[float, float]:
    """Return the median CPU time of a save in milliseconds, of the main thread and of the process."""
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=3 + NUM_SAVES, save_strategy="steps", save_steps=1, save_total_limit=num_checkpoints + 9,
            logging_steps=1, per_device_train_batch_size=4, report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        callbacks = [Grown(num_entries, num_checkpoints)]
        policy = SavePolicy(save_async=save_async)
        trainer = Timed(Net(), args, train_dataset=DATA, callbacks=callbacks, save_policy=policy)
        trainer.train()
    own, process = zip(*trainer.saves_s[3:], strict=True)  # the first ones read what is there
    return statistics.median(own) * 1e3, statistics.median(process) * 1e3


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--entries", type=int, nargs="*", default=[1000, 50_000])
    options = parser.parse_args()
    get_logger("hftrain").setLevel("ERROR")
    print("checkpoints  entries  waits ms  async: main thread ms")
    cases = [(number, 10) for number in options.checkpoints] + [(10, number) for number in options.entries]
    for num_checkpoints, num_entries in cases:
        _, process = measure(num_entries=num_entries, num_checkpoints=num_checkpoints, save_async=False)
        own, _ = measure(num_entries=num_entries, num_checkpoints=num_checkpoints, save_async=True)
        print(f"{num_checkpoints:11} {num_entries:8} {process:9.1f} {own:22.1f}", flush=True)


if __name__ == "__main__":
    main()
